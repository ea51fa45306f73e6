"""Write reference.md or the page of functions of to_onnx, or build the site."""

import argparse
from pathlib import Path

from jaxonnx.docs import reference, write_coverage

parser = argparse.ArgumentParser(
    prog="python -m jaxonnx.docs", description="Without a command, write reference.md."
)
commands = parser.add_subparsers(dest="command")
commands.add_parser("coverage", help="write to_onnx_functions.md: every function is exported")
build = commands.add_parser("build", help="build the site")
build.add_argument("site", type=Path, help="the folder to write")
build.add_argument("--url", help="where the site will be; by default as in pyproject.toml")
build.add_argument("--repository", help="where pages are edited; by default as in pyproject.toml")
arguments = parser.parse_args()
if arguments.command == "coverage":
    write_coverage()
elif arguments.command:
    from jaxonnx.docs._site import build_site

    build_site(arguments.site, url=arguments.url, repository=arguments.repository)
else:
    (Path(__file__).parent / "reference.md").write_text(reference(), "utf-8")
