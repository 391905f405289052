"""Which dispatches run rounds exactly, because the ones before did not hold their rows."""

import dataclasses

MOST = 64


@dataclasses.dataclass
class Repeats:
    """One exact dispatch after rounds that gave nothing, twice as many whenever the next ones give nothing again."""

    left: int = 0
    """Exact dispatches that are due."""
    patience: int = 1
    """Exact dispatches that the next overflow asks for."""

    def next(self) -> bool:
        """Whether the dispatch that is planned now has to be exact."""
        return self.left > 0

    def sent(self, exact: bool) -> None:
        """A dispatch with rounds was sent."""
        self.left -= exact

    def observe(self, overflowed: bool, exact: bool) -> None:
        """A dispatch with rounds was read."""
        if overflowed:
            self.left, self.patience = max(self.left, self.patience), min(2 * self.patience, MOST)
        elif not exact:
            self.patience = 1
