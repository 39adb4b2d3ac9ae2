"""Makes the pages and files that say what the code says: `make reference`. With --check it writes nothing, names
those that are out of date and ends with 1: `make check`."""

import sys

from reference.files import MADE, ROOT, outdated


def main(arguments: list[str]) -> int:
    """Make them, or look at them; the exit code."""
    old = [name for name in MADE if outdated(name)]
    for name in old:
        if arguments == ["--check"]:
            print(f"{name} is out of date: run make reference", file=sys.stderr)
        else:
            (ROOT / name).parent.mkdir(parents=True, exist_ok=True)
            (ROOT / name).write_text(MADE[name]())
            print(f"made {name}")
    return int(bool(old) and arguments == ["--check"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
