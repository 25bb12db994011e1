"""Pictures of graphs."""

import base64
import io

import pytest
from PIL import Image

from sr_assets.assets.charts import graph_picture
from sr_assets.domain.topology.graph import Graph, graph_of
from sr_assets.domain.topology.links import Link

_CITIES = [Link("hub", "ALL", "source", f"CITY_{n}", "hub", f"city{n}", active_seconds=0.1) for n in range(6)]
_LOOP = [
    Link("hub", *names, "hub", "hub", active_seconds=0.1) for names in (("A", "mirror", "B"), ("B", "source", "A"))
]
_HOSTILE = Link("hub", "$x_{$", "mirror", 'a"b\\N"; //&lt;\n<b>]}', "hub", "hub", active_seconds=99.0)


@pytest.mark.parametrize(
    "graph",
    (graph_of([("hub", "hub", "S")], []), graph_of([], _CITIES), graph_of([], _LOOP), graph_of([], [_HOSTILE])),
    ids=("one stream", "fan-in", "loop", "hostile names"),
)
def test_graph_picture_is_an_image(graph: Graph) -> None:
    text = str(graph_picture(graph).value)
    image = Image.open(io.BytesIO(base64.b64decode(text.removeprefix("![streams](data:image/png;base64,")[:-1])))
    assert min(image.size) > 50


def test_streams_of_one_graph_share_a_picture() -> None:
    assert graph_picture(graph_of([], _CITIES)) is graph_picture(graph_of([], _CITIES))
