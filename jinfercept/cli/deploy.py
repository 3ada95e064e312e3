"""`jinfercept deploy`: a fleet of a file on a Ray cluster, or on a Ray of this machine. Imports what it needs when it runs."""

from dataclasses import dataclass
from typing import Annotated

from tyro import conf

from jinfercept.cli.options import Maybe, Switch


@dataclass(frozen=True)
class Deploy:
    """The command."""

    file: Annotated[conf.Positional[str], conf.arg(metavar="FILE", help="YAML; see docs/fleet.md")]
    ray_address: Maybe[str] = None
    """a Ray cluster's HOST:PORT, or auto; the fleet outlives this command (default: Ray is started on this machine, and ends
    with this command)"""
    check: Switch = False
    """only check the file, and whether the database's URL and the files of tools can be read; nothing is started"""

    def run(self) -> int:
        """Deploy, or update what is deployed under the same name; returns 0. Raises `ConfigError`."""
        from jinfercept.fleet.app_config import FleetConfig

        config = FleetConfig.read(self.file)
        if self.check:
            config.check_files()
            least, most = config.replicas
            print(f"{config.name}: {config.model}, {least if least == most else f'{least} to {most}'} replicas")
            return 0
        from jinfercept.fleet.ray_deploy import deploy
        from jinfercept.server.observe.log_lines import begin_logging

        begin_logging(config.server.log_format)
        deploy(config, self.ray_address)
        return 0
