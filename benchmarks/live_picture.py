"""`python -m benchmarks.live_picture docs/live.webp`: the live page while eight coding agents are served, as a moving picture.

A server with a small pool, the load of `python -m benchmarks agents`, and a headless Chromium that takes pictures of its page.
Needs `pip install playwright pillow`, and `playwright install chromium` or `--chromium PATH`.
"""

import argparse
import subprocess
import sys
import time
from io import BytesIO
from pathlib import Path

from benchmarks.servers import child_server

WIDTH, HEIGHT, SHOWN_WIDTH = 1300, 860, 1000
"""Pixels of the page, and of the moving picture."""
BEFORE_S, FRAMES, EVERY_S = 20.0, 24, 3.0
"""Seconds of load before the first picture, how many there are, and the seconds between two."""
FLAGS = {"kv_tokens": 4096, "dtype": "bfloat16", "max_num_batched_tokens": 256}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", help="a .webp file; its last frame is written beside it as .png")
    parser.add_argument("--chromium", help="path of a browser (default: Playwright's)")
    options = parser.parse_args()
    with child_server("smollm2-135m", FLAGS) as url:
        write(film(url, options.chromium), Path(options.out))


def film(url: str, chromium: str | None) -> list[bytes]:
    """Pictures of a server's page under the load of agents, as PNG."""
    from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports]

    load = subprocess.Popen([sys.executable, "-m", "benchmarks", "agents", "--base-url", url])
    try:
        with sync_playwright() as playwright:
            flags = ["--no-sandbox", "--single-process", "--no-zygote"]
            browser = playwright.chromium.launch(args=flags, executable_path=chromium)
            page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
            page.goto(url)
            time.sleep(BEFORE_S)
            frames = []
            for _ in range(FRAMES):
                frames.append(page.screenshot())
                time.sleep(EVERY_S)
            browser.close()
    finally:
        load.terminate()
        load.wait()
    return frames


def write(frames: list[bytes], out: Path) -> None:
    """The frames as one moving picture, two a second, and the last one as it was taken."""
    from PIL import Image

    pictures = [Image.open(BytesIO(frame)).convert("RGB") for frame in frames]
    size = (SHOWN_WIDTH, SHOWN_WIDTH * HEIGHT // WIDTH)
    small = [picture.resize(size, Image.Resampling.LANCZOS) for picture in pictures]
    small[0].save(out, save_all=True, append_images=small[1:], duration=500, loop=0, quality=60, method=6)
    out.with_suffix(".png").write_bytes(frames[-1])


if __name__ == "__main__":
    main()
