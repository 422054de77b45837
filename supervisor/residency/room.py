"""What is left of a budget while one plan is made. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Room:
    """What is free, and what is being freed and not promised to anyone yet."""

    free: int
    coming: int
    places: float
    places_coming: int

    def fits(self, need: int) -> bool:
        return need <= self.free and self.places >= 1

    def will_fit(self, need: int) -> bool:
        return need <= self.free + self.coming and self.places + self.places_coming >= 1

    def take(self, need: int) -> "Room":
        """Promise `need` and a place to someone: first what is free, then what is coming."""
        now = min(need, max(0, self.free))
        later = min(need - now, self.coming)
        place = 1 if self.places >= 1 else 0
        return Room(
            self.free - now, self.coming - later, self.places - place, self.places_coming - (1 - place)
        )
