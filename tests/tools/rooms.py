"""docs/rooms.svg: the rooms and who uses whom, as the layer test has it."""

from test_layers import MAY_IMPORT

OPEN_TO_ALL = {"comm", "comm.config", "comm.proto", "comm.cli", "configs"}  # left out: everybody uses them
WIDTH, HEIGHT, X, Y = 172, 30, 190, 74  # pixels: a room's box, and the grid's pitch

# Column and row of each room in the grid; rows from the top.
PLACES: dict[str, tuple[float, float]] = {
    **{"coordinator.demo": (0.5, 0), "coordinator.bench": (2, 1), "coordinator.cli": (0.5, 1)},
    **{"coordinator.server": (0.5, 2), "coordinator.monitor": (0, 3), "coordinator.service": (1, 4)},
    "coordinator.tracking": (2, 3),
    **{"coordinator.history": (2, 4.5), "coordinator.state_machine": (1, 5)},
    **{"coordinator.placement": (2, 6), "coordinator.door": (0, 5)},
    **{"coordinator.causes": (1, 6)},
    **{
        "node.doctor": (3, 0),
        "node.service": (3, 1),
        "node.cli": (4, 0),
        "node.bench": (5, 0),
        "node.daemon": (4, 1),
        "node.simulate": (6.4, 0),
    },
    **{
        "node.checks": (3, 1.6),
        "node.control": (3, 3),
        "node.recovery": (3.95, 3),
        "node.gateway": (3, 5),
        "node.manners": (3, 4),
        "node.state_machine": (5.3, 2),
        "node.trainer": (6.4, 1),
        "node.engines": (7.4, 1),
        "node.participant": (6.4, 2),
    },
    **{
        "node.data": (7.4, 3),
        "node.checkpoint": (4.9, 3),
        "node.export": (5.1, 1),
        "node.outer": (4.9, 4),
        "node": (6.4, 5),
        "outer_opt": (6, 6),
    },
    **{"comm.allreduce": (4, 5), "comm.transport": (3, 6), "comm.codecs": (3.8, 7)},
}
COLORS = {"coordinator": "#dbe9ff", "node": "#dff3e1", "comm": "#fdeed3", "outer_opt": "#f3e1f4"}


def uses() -> dict[str, set[str]]:
    """The graph without rooms that are open to all, and without arrows that a longer way implies."""
    graph = {room: others - OPEN_TO_ALL for room, others in MAY_IMPORT.items() if room not in OPEN_TO_ALL}

    def reached(room: str) -> set[str]:
        return {far for near in graph[room] for far in (near, *reached(near))}

    return {
        room: {o for o in others if not any(o in reached(n) for n in others)} for room, others in graph.items()
    }


def draw() -> str:
    """The picture as SVG text."""
    at = {room: (20 + column * X, 20 + row * Y) for room, (column, row) in PLACES.items()}
    width, height = max(x for x, _ in at.values()) + WIDTH + 20, max(y for _, y in at.values()) + HEIGHT + 20
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" font-family="sans-serif" '
        'font-size="12">',
        '<marker id="a" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#667"/></marker>',
        f'<rect width="{width:g}" height="{height:g}" fill="white"/>',
    ]
    for room, others in sorted(uses().items()):
        for other in sorted(others):
            (x, y), (u, v) = at[room], at[other]
            if v > y:
                start, end = (x + WIDTH / 2, y + HEIGHT), (u + WIDTH / 2, v)
            else:
                side = WIDTH if u > x else 0
                start, end = (x + side, y + HEIGHT / 2), (u + WIDTH - side, v + HEIGHT / 2)
            out.append(
                f'<path d="M{start[0]:g} {start[1]:g}L{end[0]:g} {end[1]:g}" stroke="#889" fill="none" '
                'marker-end="url(#a)"/>'
            )
    for room, (x, y) in at.items():
        color = COLORS[room.split(".")[0]]
        out.append(
            f'<rect x="{x:g}" y="{y:g}" width="{WIDTH}" height="{HEIGHT}" rx="6" fill="{color}" stroke="#556"/>'
        )
        name = room.replace(".", "/") if room != "node" else "node: data, config"
        out.append(f'<text x="{x + WIDTH / 2:g}" y="{y + 19:g}" text-anchor="middle">{name}</text>')
    return "\n".join([*out, "</svg>", ""])
