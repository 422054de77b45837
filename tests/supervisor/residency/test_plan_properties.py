"""The planner driven through random histories: a world of models, requests and a clock of its own."""

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mlxhost.supervisor.residency.facts import Budget, Evict, Hold, Load, Phase, Refuse, Release, Unit, Wish
from mlxhost.supervisor.residency.plan import plan

BUDGET = 10
NAMES = st.sampled_from("abcde")
ENOUGH = 200  # turns in which a wish must be granted once requests end


@dataclass
class Fact:
    """One model of the world."""

    need: int
    priority: int
    pinned: bool = False
    phase: Phase = Phase.ABSENT
    requests: int = 0
    since: float = 0.0
    used: float = 0.0
    wished: float | None = None
    refused: bool = False


class World(RuleBasedStateMachine):
    """Loads and unloads take a turn of the clock; what the planner says is done at once."""

    @initialize(
        needs=st.lists(st.integers(1, 12), min_size=5, max_size=5),
        priorities=st.lists(st.integers(-1, 1), min_size=5, max_size=5),
        most=st.integers(0, 3),
    )
    def begin(self, needs: list[int], priorities: list[int], most: int) -> None:
        self.models = {
            name: Fact(need, priority)
            for name, need, priority in zip("abcde", needs, priorities, strict=True)
        }
        self.budget = Budget(BUDGET, max_resident=most, min_resident_s=10, idle_s=2, patience_s=4)
        self.now = 0.0

    # --- the world

    def fleet(self) -> list[Unit]:
        return [
            Unit(
                name,
                m.phase,
                m.need,
                0 if m.phase is Phase.ABSENT else m.need,
                busy=m.requests > 0,
                pinned=m.pinned,
                priority=m.priority,
                since=m.since,
                used=self.now if m.requests else m.used,
            )
            for name, m in self.models.items()
        ]

    def replan(self) -> None:
        wishes = [Wish(n, m.wished) for n, m in self.models.items() if m.wished is not None]
        before = {u.name: u for u in self.fleet()}
        actions = plan(list(before.values()), self.budget, wishes, self.now)
        assert len({a.model for a in actions}) == len(actions)
        refused = {a.model for a in actions if isinstance(a, Refuse)}
        for action in actions:
            model, unit = self.models[action.model], before[action.model]
            match action:
                case Load():
                    assert unit.phase is Phase.ABSENT
                    assert model.wished is not None
                    model.phase = Phase.LOADING
                case Evict():
                    assert unit.phase in (Phase.RESIDENT, Phase.HELD)
                    assert not unit.busy
                    assert not unit.pinned
                    assert action.wanted_by not in refused
                    held = unit.phase is Phase.HELD
                    assert held or self.now - unit.since >= 10 or self.now - unit.used >= 2, "thrash"
                    model.phase = Phase.LEAVING
                case Hold():
                    assert unit.phase is Phase.RESIDENT
                    assert not unit.pinned
                    assert self.now - unit.since >= 10
                    model.phase = Phase.HELD
                case Release():
                    assert unit.phase is Phase.HELD
                    model.phase, model.wished = Phase.RESIDENT, None
                case Refuse():
                    assert self.cannot_fit(action.model)
                    model.wished, model.refused = None, True

    def cannot_fit(self, name: str) -> bool:
        kept = [m for m in self.models.values() if m.pinned and m.phase is not Phase.ABSENT]
        full = bool(self.budget.max_resident) and len(kept) >= self.budget.max_resident
        return self.models[name].need > BUDGET - sum(m.need for m in kept) or full

    def turn(self, seconds: float = 1.0) -> None:
        self.now += seconds
        for model in self.models.values():
            if model.phase is Phase.LOADING:
                model.phase, model.since, model.used, model.wished = Phase.RESIDENT, self.now, self.now, None
            elif model.phase is Phase.LEAVING:
                model.phase = Phase.ABSENT
        self.replan()

    # --- what happens

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.turn(seconds)

    @rule(name=NAMES)
    def request(self, name: str) -> None:
        model = self.models[name]
        if model.phase is Phase.RESIDENT:
            model.requests += 1
        elif model.wished is None:
            model.wished, model.refused = self.now, False
        self.replan()

    @rule(name=NAMES)
    def answer(self, name: str) -> None:
        model = self.models[name]
        if model.requests:
            model.requests, model.used = model.requests - 1, self.now
        self.replan()

    @rule(name=NAMES)
    def pin_or_unpin(self, name: str) -> None:
        model = self.models[name]
        # A model that is being made room with is not pinned in the middle of it.
        model.pinned = not model.pinned and model.phase not in (Phase.HELD, Phase.LEAVING)
        self.replan()

    @rule(name=NAMES)
    def give_up(self, name: str) -> None:
        self.models[name].wished = None
        self.replan()

    @precondition(lambda self: any(m.phase is Phase.LOADING for m in self.models.values()))
    @rule()
    def load_fails(self) -> None:
        model = next(m for m in self.models.values() if m.phase is Phase.LOADING)
        model.phase, model.wished = Phase.ABSENT, None
        self.replan()

    # --- what must hold

    @invariant()
    def never_over_budget(self) -> None:
        held = [m for m in getattr(self, "models", {}).values() if m.phase is not Phase.ABSENT]
        assert sum(m.need for m in held) <= BUDGET
        if held and self.budget.max_resident:
            assert len(held) <= self.budget.max_resident

    def teardown(self) -> None:
        """Nobody starves: while requests for resident models go on, every wish is granted or refused."""
        if not hasattr(self, "models"):
            return
        self.replan()
        waiting = {n: m.wished for n, m in self.models.items() if m.wished is not None}
        for turn in range(ENOUGH):
            for name, model in self.models.items():
                # Requests of 3 turns, back to back, on everything that takes them.
                if model.phase is Phase.RESIDENT:
                    model.requests = 1
                elif turn % 3 == 0 and model.requests:
                    model.requests, model.used = 0, self.now
                if model.wished is None or model.wished != waiting.get(name):
                    waiting.pop(name, None)
            if not waiting:
                return
            self.turn()
        raise AssertionError(f"{waiting} not granted after {ENOUGH} s")


TestWorld = World.TestCase
TestWorld.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
