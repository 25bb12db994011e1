"""Draw the timelines of the documents as SVG with selectable text, on white also in a dark page. Run by `make pictures`."""

from dataclasses import dataclass, field
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent / "pictures"
WIDTH, LEFT, RIGHT, ROW = 820, 130, 24, 34
COLOURS = {
    "up": "#2e7d32",
    "timeout": "#bf4d00",
    "retired": "#616161",
    "blind": "#546e7a",
    "stopped": "#b0bec5",
    "running": "#1565c0",
    "text": "#212121",
}


def minutes(time: str) -> int:
    """Return the minutes since midnight of "hh:mm"."""
    hours, rest = time.split(":")
    return int(hours) * 60 + int(rest)


@dataclass
class Timeline:
    """A picture with a time axis, and one row for each subject."""

    title: str
    begin: str
    end: str
    step: int
    _parts: list[str] = field(default_factory=list)
    _rows: int = 0

    def x(self, time: str) -> float:
        """Return the place of a time."""
        share = (minutes(time) - minutes(self.begin)) / (minutes(self.end) - minutes(self.begin))
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    @property
    def y(self) -> int:
        """The middle of the present row."""
        return 36 + self._rows * ROW

    def row(self, name: str) -> None:
        """Begin a row."""
        self._rows += 1
        self.text(LEFT - 12, self.y + 4, name, anchor="end", weight="bold")

    def text(
        self, x: float, y: float, words: str, *, anchor: str = "middle", weight: str = "normal", fill: str = "text"
    ) -> None:
        """Write words."""
        colour = COLOURS.get(fill, fill)
        self._parts.append(
            f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-weight="{weight}" fill="{colour}">{escape(words)}</text>'
        )

    def span(self, begin: str, end: str, kind: str, words: str = "") -> None:
        """Draw a bar with words in it."""
        x = self.x(begin)
        wide = round(self.x(end) - x, 1)
        self._parts.append(
            f'<rect x="{x}" y="{self.y - 10}" width="{wide}" height="20" rx="3" fill="{COLOURS[kind]}"/>'
        )
        if words:
            self.text(round(x + wide / 2, 1), self.y + 4, words, fill="white")

    def messages(self, *times: str, copied: tuple[str, ...] = ()) -> None:
        """Draw messages as circles, the copied ones full."""
        for time in times:
            fill = COLOURS["running"] if time in copied else "white"
            self._parts.append(
                f'<circle cx="{self.x(time)}" cy="{self.y}" r="5" fill="{fill}" stroke="{COLOURS["running"]}" stroke-width="2"/>'
            )

    def measure(self, begin: str, end: str, words: str) -> None:
        """Draw a length with arrows at both ends."""
        left, right = self.x(begin), self.x(end)
        self._parts.append(
            f'<path d="M{left},{self.y - 7}v14M{right},{self.y - 7}v14M{left},{self.y}H{right}" '
            f'stroke="{COLOURS["text"]}" fill="none"/>'
        )
        middle, wide = round((left + right) / 2, 1), 7 * len(words) + 8
        self._parts.append(f'<rect x="{middle - wide / 2}" y="{self.y - 8}" width="{wide}" height="16" fill="white"/>')
        self.text(middle, self.y + 4, words)

    def event(self, time: str, words: str, *, anchor: str = "middle") -> None:
        """Draw what is announced: a triangle below the axis, and its words."""
        x = self.x(time)
        self._parts.append(f'<path d="M{x},{self.y - 12}l5,8h-10z" fill="{COLOURS["text"]}"/>')
        shift = {"middle": 0, "start": -5, "end": 5}[anchor]
        self.text(x + shift, self.y + 11, words, anchor=anchor)

    def line(self, time: str) -> None:
        """Draw a dotted line through all rows at a time."""
        self._parts.insert(
            0,
            f'<line x1="{self.x(time)}" x2="{self.x(time)}" y1="44" y2="{{bottom}}" stroke="#9e9e9e" stroke-dasharray="2 3"/>',
        )

    def save(self, name: str) -> None:
        """Write the picture."""
        bottom = self.y + 20
        axis = []
        for time in range(minutes(self.begin), minutes(self.end) + 1, self.step):
            label = f"{time // 60}:{time % 60:02}"
            x = self.x(label)
            axis.append(
                f'<path d="M{x},34v6" stroke="#757575"/><text x="{x}" y="28" text-anchor="middle">{label}</text>'
            )
        axis.append(f'<path d="M{LEFT},40H{WIDTH - RIGHT}" stroke="#757575"/>')
        body = "\n".join([*axis, *(part.replace("{bottom}", str(bottom)) for part in self._parts)])
        (FOLDER / f"{name}.svg").write_text(
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{bottom + 6}" viewBox="0 0 {WIDTH} {bottom + 6}" '
            f'role="img" font-family="sans-serif" font-size="12">\n<title>{escape(self.title)}</title>\n'
            f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
        )


def silence() -> None:
    """Draw a node that falls silent, is retired and returns; W is 30 minutes, I an hour."""
    picture = Timeline("A silence", "10:00", "11:45", 10)
    for time in ("10:10", "10:40", "11:10", "11:30"):
        picture.line(time)
    picture.row("its messages")
    picture.messages("10:00", "10:05", "10:10", "11:30", "11:35", "11:40", copied=("10:00", "11:30"))
    picture.text(picture.x("10:13"), picture.y + 4, "last seen 10:10", anchor="start")
    picture.row("silent for")
    picture.measure("10:10", "10:40", "W = 30 min")
    picture.row("")
    picture.measure("10:10", "11:10", "I = 60 min")
    picture.row("status")
    picture.span("10:00", "10:40", "up", "up")
    picture.span("10:40", "11:10", "timeout", "timeout")
    picture.span("11:10", "11:30", "retired", "retired")
    picture.span("11:30", "11:45", "up", "up")
    picture.row("announced")
    picture.event("10:00", "new", anchor="start")
    picture.event("10:40", "timeout")
    picture.event("11:10", "expire")
    picture.event("11:30", "new (returned)")
    picture.row("watermark")
    picture.span(
        "10:00", "11:43", "running", "follows the source's clock by a second: every earlier message has been read"
    )
    picture.save("silence")


def downtime() -> None:
    """Draw a downtime of sr-assets: late announcements with true times, and no false alarm."""
    picture = Timeline("A downtime of sr-assets", "10:00", "12:15", 15)
    for time in ("10:20", "12:00"):
        picture.line(time)
    picture.row("sr-assets")
    picture.span("10:00", "10:20", "running", "running")
    picture.span("10:20", "12:00", "stopped", "")
    picture.text(picture.x("11:10"), picture.y + 4, "down; the source keeps the messages")
    picture.span("12:00", "12:15", "running", "running")
    picture.row("node A sends")
    picture.messages(*(f"{10 + each // 60}:{each % 60:02}" for each in range(0, 135, 10)))
    picture.row("A: announced")
    picture.text(picture.x("11:10"), picture.y + 4, "nothing: its messages are read at 12:00, and there was no silence")
    picture.row("node B sends")
    picture.messages("10:00", "10:10")
    picture.row("B: status")
    picture.span("10:00", "10:40", "up", "up")
    picture.span("10:40", "11:10", "timeout", "timeout")
    picture.span("11:10", "12:15", "retired", "retired")
    picture.row("B: announced")
    picture.event("12:00", "timeout of 10:40 (late), expire of 11:10", anchor="end")
    picture.save("downtime")


def blind() -> None:
    """Draw messages that the source loses unread: the blind span does not count as silence."""
    picture = Timeline("A blind span", "10:00", "11:45", 10)
    for time in ("10:30", "10:50"):
        picture.line(time)
    picture.row("the source")
    picture.span("10:00", "10:30", "running", "messages are read")
    picture.span("10:30", "10:50", "blind", "lost unread")
    picture.span("10:50", "11:45", "running", "messages are read")
    picture.row("node B seen")
    picture.messages("10:00", "10:05", "10:10")
    picture.text(picture.x("10:40"), picture.y + 4, "B may have sent")
    picture.row("silent for")
    picture.measure("10:10", "10:30", "20 min")
    picture.measure("10:50", "11:00", "10 min")
    picture.measure("11:00", "11:30", "30 min")
    picture.row("status")
    picture.span("10:00", "10:30", "up", "up")
    picture.span("10:30", "10:50", "blind", "blind")
    picture.span("10:50", "11:00", "up", "up")
    picture.span("11:00", "11:30", "timeout", "timeout")
    picture.span("11:30", "11:45", "retired", "retired")
    picture.row("announced")
    picture.event("11:00", "timeout, 20 minutes later")
    picture.event("11:30", "expire")
    picture.save("blind")


def guard() -> None:
    """Draw an outage of a site under the outage guard."""
    picture = Timeline("An outage under the outage guard", "10:00", "12:15", 15)
    for time in ("10:45", "11:30", "12:00"):
        picture.line(time)
    picture.row("nodes 1 to 9 send")
    picture.messages("10:05", "10:15", "11:30", "11:40", "11:50", "12:00", "12:10")
    picture.row("node 10 sends")
    picture.messages("10:05", "10:15")
    picture.row("the guard")
    picture.span("10:45", "11:30", "timeout", "delays every timeout, expire")
    picture.span("11:30", "12:00", "blind", "waits for W")
    picture.row("site events")
    picture.event("10:45", "dark")
    picture.event("11:30", "restored")
    picture.row("1 to 9: announced")
    picture.text(picture.x("11:07"), picture.y + 4, "nothing: they report again")
    picture.row("10: announced")
    picture.event("12:00", "timeout of 10:45, expire of 11:15", anchor="end")
    picture.save("guard")


if __name__ == "__main__":
    silence()
    downtime()
    blind()
    guard()
