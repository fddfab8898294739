"""The step loop: look up each op's handler, stamp its start and end, advance started rings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mpisim.engine.handlers import HANDLERS
from mpisim.engine.state import EngineState, LoadRows, StepState
from mpisim.engine.update import abandon_step, fingerprint, require_clean_start
from mpisim.errors import CommError
from mpisim.nn.optim import learning_rate
from mpisim.plan.build import Plan
from mpisim.plan.ops import WAIT_AXIS
from mpisim.plan.text import op_text
from mpisim.trace.events import PlanTable

MEMORY_STEPS = 2
"""Runs of a plan whose memory is recorded op by op; later runs repeat the same curve."""


class Engine:
    """Runs plans on one rank.

    Parameters
    ----------
    state : EngineState
    total_steps : int
        Updates of the whole run, for the learning-rate schedule.
    predict_temps : callable, optional
        What every op of a plan needs beside what the ledger holds, bytes; used where nothing
        measures it. By default nothing.
    """

    def __init__(
        self,
        state: EngineState,
        total_steps: int,
        predict_temps: Callable[[Plan], Sequence[int]] | None = None,
    ) -> None:
        self.state = state
        self.total_steps = total_steps
        self._predict_temps = predict_temps
        self._texts: dict[int, tuple[str, ...]] = {}
        self._temps: dict[int, Sequence[int]] = {}
        self._plans: dict[str, tuple[Plan, int]] = {}
        self._memory_left: dict[int, int] = {}

    def train_step(
        self, plan: Plan, step: int, load: LoadRows, num_targets: int | None = None
    ) -> StepState:
        """Run one update and return what it left: loss sum, norm, metrics (on rank 0).

        Parameters
        ----------
        plan : Plan
        step : int
            Number of the step, for messages and the trace; the schedule, the bias correction and
            the dropout masks follow the committed updates instead.
        load : callable of int
            Microbatch number -> rows.
        num_targets : int, optional
            Valid targets of this rank's rows; by default every row has one.

        Raises
        ------
        BatchError
            The gradients are not zero at the start, a microbatch is not what the plan was built
            for, or the whole update has no valid target.
        MpisimError
            The update would not be finite; see `mpisim.engine.update`.

        Notes
        -----
        What is raised before the commit leaves parameters, moments, counters, schedule and loss
        scale bit for bit as they were and the gradients zero (but gradients that are not zero at
        the start stay as they were found). What fails after it finds the update made:
        `EngineState.committed` tells.
        """
        state, settings = self.state, self.state.optimizer
        require_clean_start(state)
        current = StepState(load, step)
        current.num_targets = sum(plan.rows[state.rank]) if num_targets is None else num_targets
        current.update_number = state.committed + 1
        current.loss_scale = state.loss_scale.value
        current.weights = fingerprint(state)
        current.lr = learning_rate(
            state.committed, lr=settings.lr, warmup_steps=settings.warmup_steps,
            schedule=settings.schedule, min_lr_ratio=settings.min_lr_ratio,
            total_steps=self.total_steps,
        )  # fmt: skip
        self._try_to_run(plan, current)
        return current

    def evaluate(self, plan: Plan, step: int, load: LoadRows) -> StepState:
        """Run a forward-only plan; parameters stay as they are."""
        current = StepState(load, step)
        self._try_to_run(plan, current)
        # What the evaluation moved belongs to no step.
        for communicator in self.state.communicators:
            self.state.meter.traffic(communicator)
        self.state.meter.link_stalls(self.state.links)
        return current

    def _try_to_run(self, plan: Plan, current: StepState) -> None:
        state = self.state
        try:
            self._run(plan, current)
        except MemoryError as error:
            # Before anything is freed: it says what was held.
            exceeded = state.watch.explained(error)
            abandon_step(state)
            raise exceeded from exceeded.__cause__
        except BaseException:
            # Undoing a step may take a few bytes, and the error on its way keeps arrays alive.
            state.watch.lift_wall()
            abandon_step(state)
            raise

    def _run(self, plan: Plan, current: StepState) -> None:
        state = self.state
        recorder = state.recorder
        ops = plan.ranks[state.rank]
        number = self._register(plan)
        unfinished = [each.axis for each in state.communicators if not each.idle]
        if unfinished:
            # Their messages would be taken for those of this step.
            raise CommError(
                f"collectives of a step that failed must be finished before the next one; got some "
                f"of axis {unfinished[0]} unfinished at the start of step {current.step}. End the "
                f"job."
            )
        state.enter(plan, current)
        recorder.step = current.step
        stamp, clock, dp = recorder.op_stamps.append, recorder.clock, state.dp
        remember = recorder.enabled and self._memory_left[number] > 0
        watch, texts, temps = state.watch, self._texts[number], self._temps[number]
        # A number that is not finite shows in the gradient norm, which ends the job with one clear
        # error; NumPy's warnings on the way there would only surround it.
        with np.errstate(over="ignore", invalid="ignore"):
            for index, op in enumerate(ops):
                watch.begin(texts[index])
                stamp(clock())
                HANDLERS[type(op)](state, op)
                stamp(clock())
                watch.end(temps[index])
                if state.observe_op is not None:
                    state.observe_op(op)
                if not dp.idle:
                    dp.advance()
                if remember:
                    recorder.add_memory(index, state.ledger.op_vector())
        if remember:
            self._memory_left[number] -= 1
        recorder.end_step(number)
        watch.end_step()
        # It may hold the rows of the whole step, and outlives the step in the caller's hands.
        current.load = None
        state.step = None

    def _register(self, plan: Plan) -> int:
        known = self._plans.get(plan.name)
        if known is not None and known[0] is plan:
            return known[1]
        ops = plan.ranks[self.state.rank]
        texts = tuple(op_text(op) for op in ops)
        number = self.state.recorder.add_plan(
            PlanTable(
                name=plan.name,
                kinds=tuple(type(op).__name__ for op in ops),
                texts=texts,
                waits=tuple(WAIT_AXIS.get(type(op), "") for op in ops),
            )
        )
        self._plans[plan.name] = (plan, number)
        self._memory_left[number] = MEMORY_STEPS
        self._texts[number] = texts
        predict = self._predict_temps
        self._temps[number] = predict(plan) if predict is not None else (0,) * len(ops)
        return number
