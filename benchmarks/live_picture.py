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
from typing import Any

from benchmarks.servers import child_server

WIDTH, HEIGHT = 1300, 860
FLAGS = {"kv_tokens": 4096, "dtype": "bfloat16", "max_num_batched_tokens": 256}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", help="a .webp file; its last frame is written beside it as .png")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--base-url", help="of a server that runs (default: one is started)")
    parser.add_argument("--chromium", help="path of a browser (default: Playwright's)")
    parser.add_argument(
        "--after", type=float, default=20.0, help="seconds of load before the first frame (default: 20)"
    )
    parser.add_argument("--frames", type=int, default=24, help="pictures (default: 24)")
    parser.add_argument("--every", type=float, default=3.0, help="seconds between two of them (default: 3)")
    parser.add_argument("--width", type=int, default=1000, help="pixels of the moving picture (default: 1000)")
    options = parser.parse_args()
    if options.base_url:
        frames = film(options.base_url, options)
    else:
        with child_server(options.model, FLAGS) as url:
            frames = film(url, options)
    write(frames, Path(options.out), options.width)


def film(url: str, options: argparse.Namespace) -> list[bytes]:
    """Pictures of a server's page under the load of agents, as PNG."""
    from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports]

    load = subprocess.Popen([sys.executable, "-m", "benchmarks", "agents", "--base-url", url])
    try:
        with sync_playwright() as playwright:
            chosen: dict[str, Any] = {"executable_path": options.chromium} if options.chromium else {}
            browser = playwright.chromium.launch(args=["--no-sandbox", "--single-process", "--no-zygote"], **chosen)
            page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
            page.goto(url)
            time.sleep(options.after)
            frames = []
            for _ in range(options.frames):
                frames.append(page.screenshot())
                time.sleep(options.every)
            browser.close()
    finally:
        load.terminate()
        load.wait()
    return frames


def write(frames: list[bytes], out: Path, width: int) -> None:
    """The frames as one moving picture, two a second, and the last one as it was taken."""
    from PIL import Image

    pictures = [Image.open(BytesIO(frame)).convert("RGB") for frame in frames]
    size = (width, round(width * pictures[0].height / pictures[0].width))
    small = [picture.resize(size, Image.Resampling.LANCZOS) for picture in pictures]
    small[0].save(out, save_all=True, append_images=small[1:], duration=500, loop=0, quality=60, method=6)
    out.with_suffix(".png").write_bytes(frames[-1])


if __name__ == "__main__":
    main()
