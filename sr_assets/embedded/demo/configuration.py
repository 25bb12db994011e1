"""The demo's configuration file for any number of cities, made from the commented template `conf/demo.yaml`."""

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Final

CITIES: Final = (
    *("london", "paris", "berlin", "madrid", "rome", "vienna", "prague", "warsaw", "dublin", "lisbon"),
    *("oslo", "helsinki", "athens", "budapest", "brussels", "zagreb", "sofia", "riga", "vilnius", "tallinn"),
)
CENTRE: Final = "centre"
#: The name of the template, and of the file in the demo's folder.
FILE_NAME: Final = "demo.yaml"
_FEEDS_COMMENT: Final = "\n# The centre's view"


def configuration(cities: Sequence[str], home: Path, urls: Mapping[str, str]) -> str:
    """Return the template's text for these cities, with its last city's entries repeated for each further city.

    `urls` has the URLs of all cities' servers and of `centre`. The text contains them, so that other commands can use
    the file.
    """
    template = files("sr_assets").joinpath("conf", FILE_NAME).read_text(encoding="utf-8")
    head, first_line, rest = template.partition(f"  - name: {CITIES[1]}\n")
    rest, comment, feeds = rest.partition(_FEEDS_COMMENT)
    others = [city for city in cities if city != CITIES[0]]
    entries = [_of_city(first_line + rest, city) for city in others]
    # The centre's part has one line per city.
    centre = [
        _of_city(line, city)
        for line in feeds.splitlines(keepends=True)
        for city in (others if CITIES[1] in line else [CITIES[1]])
    ]
    text = "\n".join([head.rstrip("\n") + "\n", *entries]) + comment + "".join(centre)
    for name, url in urls.items():
        text = text.replace(f"${{SR_DEMO_{name.upper()}_URL}}", url)
    return text.replace("${SR_DEMO_HOME}", json.dumps(str(home), ensure_ascii=False)[1:-1])


def _of_city(text: str, city: str) -> str:
    """Return text about the template's last city for another city."""
    return text.replace(CITIES[1], city).replace(CITIES[1].upper(), city.upper())
