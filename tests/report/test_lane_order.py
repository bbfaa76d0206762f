from pipedejavu.report.lane_order import sort_lanes


def test_lanes_go_from_computing_to_talking_and_peers_by_number() -> None:
    expected = [
        "compute",
        "copy-in",
        "copy-out",
        "host",
        "disk",
        "net>2",
        "net>10",
        "net<1",
        "net*dp0",
        "net",
    ]
    assert sort_lanes(reversed(expected)) == expected
