"""Reads a page back: a tree of elements with their text, for tests of what a person would see."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

_VOID = {"meta", "img", "br", "link"}


@dataclass
class Element:
    """One element with everything in it."""

    tag: str
    attributes: dict[str, str] = field(default_factory=dict)
    children: list["Element | str"] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text inside, without tags."""
        return "".join(child if isinstance(child, str) else child.text for child in self.children)

    def walk(self) -> Iterator["Element"]:
        """This element and all below it, in the order of the page."""
        yield self
        for child in self.children:
            if isinstance(child, Element):
                yield from child.walk()

    def all(self, tag: str = "", where: Callable[["Element"], bool] = lambda e: True) -> list["Element"]:
        """All elements below with this tag for which ``where`` holds."""
        return [e for e in self.walk() if e is not self and tag in ("", e.tag) and where(e)]

    def of_class(self, name: str) -> list["Element"]:
        """All elements below that have the class ``name``."""
        return self.all(where=lambda e: name in e.attributes.get("class", "").split())

    def by_id(self, name: str) -> "Element":
        """The one element with that id."""
        (found,) = self.all(where=lambda e: e.attributes.get("id") == name)
        return found


class _Tree(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.root = Element("document")
        self._open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {name: value or "" for name, value in attrs})
        self._open[-1].children.append(element)
        if tag not in _VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open[-1].children.append(Element(tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self._open[-1].tag == tag, f"</{tag}> closes <{self._open[-1].tag}>"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        self._open[-1].children.append(data)


def parse(page: str) -> Element:
    """The tree of a page; every element must be closed in order."""
    tree = _Tree()
    tree.feed(page)
    tree.close()
    assert tree._open == [tree.root]
    return tree.root
