"""Options that commands of several packages have."""

import click

# Of each command whose answer scripts may read.
json_option = click.option("--json", "as_json", is_flag=True, help="JSON instead of words.")
