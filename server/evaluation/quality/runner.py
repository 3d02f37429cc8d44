# SPDX-License-Identifier: Apache-2.0
"""Run a campaign: every configuration on a server of its own, results kept as they come."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from tandemkv.cache_rank.protocol.errors import TandemKVError
from tandemkv.server.evaluation.tokenizing import end_tokens

from .campaign import Campaign
from .configurations import Configuration
from .measure import measure
from .results import (
    MEASURED,
    TaskResult,
    read_result,
    result_files,
    with_measured,
    write_configuration,
    write_result,
)
from .samples import Sample
from .servers import (
    MeasurementError,
    NoAnswerError,
    RunningServer,
    StoppedError,
    stock_server,
    tandem_server,
    terminable,
)
from .tasks.base import Task

_OTHER_SETTING = "kept result is of another setting, measured again"
_Results = dict[str, TaskResult]
_Continuations = dict[str, dict[str, list[int]]]


def run(campaign: Campaign, console: Console, *, jobs: int) -> None:
    """Measure what is not measured yet.

    `jobs` servers run at once; each uses two or three processes of one thread on cpu. Raises
    `MeasurementError` after everything else has ended, naming the configurations that failed;
    `KeyboardInterrupt` when the user stops, by Ctrl-C or SIGTERM: what is finished is kept.
    """
    asked = [
        sample
        for configuration in campaign.configurations
        for task in campaign.tasks
        if campaign.applies(configuration, task)
        for sample in campaign.asked(task.name)
    ]
    columns = (
        TextColumn("{task.fields[answers]}/{task.fields[asked]} answers"), BarColumn(),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
    )  # fmt: skip
    with terminable(), Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=sum(map(work_of, asked)), answers=0, asked=len(asked))
        _Run(campaign, console, progress, bar).all(jobs)


def work_of(sample: Sample) -> float:
    """Return how long a sample takes beside others: tokens decoded, and a part of those read.

    For the time that is left: answers of 32K tokens take longer than those of 8K.
    """
    return sample.num_new_tokens + len(sample.question_ids) + len(sample.prompt_ids) / _READ_A_STEP


_READ_A_STEP = 64
"""Prompt tokens that take as long as a decode step, by order of magnitude."""


class _Run:
    """State of one run; methods are called from the threads of the pool."""

    def __init__(
        self, campaign: Campaign, console: Console, progress: Progress, bar: TaskID
    ) -> None:
        self._campaign, self._console = campaign, console
        self._progress, self._bar = progress, bar
        self._answers, self._lock = 0, threading.Lock()
        self._stop = threading.Event()
        self._dense: Future[_Continuations] = Future()

    def all(self, jobs: int) -> None:
        """Run every configuration; dense comes first in the list, others may wait for it."""
        failed: list[str] = []
        # The pool outlives its children: they are tied to the thread that started them.
        pool = ThreadPoolExecutor(max(1, jobs), thread_name_prefix="quality")
        try:
            futures = {c.slug: pool.submit(self._one, c) for c in self._campaign.configurations}
            for slug, future in futures.items():
                try:
                    future.result()
                except StoppedError:
                    failed.append(f"{slug}: stopped")
                except TandemKVError as error:
                    self._console.print(f"{slug} failed: {error}", markup=False, soft_wrap=True)
                    failed.append(slug)
        except BaseException:
            self._stop.set()
            self._console.print("stopping; finished results are kept", markup=False)
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
        if failed:
            raise MeasurementError(
                f"{len(failed)} of {len(futures)} configurations failed: {', '.join(failed)}; the "
                "same command again measures only these"
            )

    def _one(self, configuration: Configuration) -> None:
        try:
            self._measure(configuration)
        except BaseException as error:
            if configuration.is_dense and not self._dense.done():
                reason = MeasurementError("dense failed, and this is compared with it")
                reason.__cause__ = error
                self._dense.set_exception(reason)
            raise

    def _measure(self, configuration: Configuration) -> None:
        campaign = self._campaign
        folder = campaign.runs / configuration.slug
        write_configuration(folder, with_measured(folder, configuration))
        tasks = [task for task in campaign.tasks if campaign.applies(configuration, task)]
        # What waits for dense comes last.
        tasks.sort(key=lambda task: task.measure == "agreement" and not configuration.is_dense)
        done: _Results = {}
        for task in tasks:
            kept = read_result(folder, task.name)
            if kept is not None and kept.digest == campaign.digest_of(configuration, task.name):
                done[task.name] = kept
                self._advance(campaign.asked(task.name))
            elif kept is not None:
                self._say(configuration, task.name, _OTHER_SETTING)
                (folder / f"{task.name}.json").unlink()  # no report is to have it, if that fails
        self._set_others_aside(configuration)
        pending = [task for task in tasks if task.name not in done]
        errors: list[str] = []
        for probes in (False, True):
            group = [task for task in pending if (task.measure == "mass") is probes]
            try:
                if group:
                    self._on_one_server(configuration, group, done, probes=probes)
            except StoppedError:
                raise
            except MeasurementError as error:
                errors.append(str(error))
        if configuration.is_dense and (done or not errors):
            self._dense.set_result(_continuations(done))
        if errors:
            raise MeasurementError("; ".join(errors))

    def _set_others_aside(self, configuration: Configuration) -> None:
        """Leave out of the row what an earlier campaign of other tasks measured otherwise."""
        folder = self._campaign.runs / configuration.slug
        for path in result_files(folder):
            kept = read_result(folder, path.stem)
            if kept is None or path.stem in self._campaign.prompts.tasks:
                continue
            if not self._campaign.is_of(configuration, kept):
                path.rename(path.with_suffix(".other"))
                text = f"is of another setting, kept as {path.stem}.other and left out of reports"
                self._say(configuration, path.stem, text)

    def _on_one_server(
        self, configuration: Configuration, tasks: Sequence[Task], done: _Results, *, probes: bool
    ) -> None:
        """Add to `done` what can be measured; raise for the rest while the server's logs exist."""
        if self._stop.is_set():
            raise StoppedError("stopped")
        with self._server(configuration, probes=probes) as server:
            self._note_measured(configuration, server)
            errors: list[str] = []
            for task in tasks:
                try:
                    done[task.name] = self._on_server(server, configuration, task)
                except MeasurementError as error:  # the other tasks may well succeed
                    errors.append(f"{task.name}: {error}")
                    if isinstance(error, NoAnswerError) or self._stop.is_set():
                        break
            if errors:
                raise MeasurementError("; ".join(errors))

    def _note_measured(self, configuration: Configuration, server: RunningServer) -> None:
        """Keep what the inference rank decided at start, by what it measured there."""
        plan = server.start_plan()
        if configuration.is_open and plan:
            resolved = {**configuration.resolved, MEASURED: dict(plan)}
            known = msgspec.structs.replace(configuration, resolved=resolved)
            write_configuration(self._campaign.runs / configuration.slug, known)

    def _on_server(
        self, server: RunningServer, configuration: Configuration, task: Task
    ) -> TaskResult:
        campaign = self._campaign
        waits = task.measure == "agreement" and not server.is_stock
        dense = self._dense.result().get(task.name) if waits else {}
        if dense is None:
            raise MeasurementError("dense failed, and this is compared with it")
        result = measure(
            server,
            task=task.name,
            digest=campaign.digest_of(configuration, task.name),
            samples=campaign.prompts.samples[task.name],
            asked=campaign.asked(task.name),
            tokenizer=campaign.tokenizer,
            ends=end_tokens(campaign.model_dir, campaign.tokenizer),
            concurrency=campaign.request.concurrency,
            continuations=dense,
            on_answer=lambda sample: self._advance([sample]),
        )
        if task.measure == "mass" and result.probes is None:
            raise MeasurementError(
                "nothing was probed, no request became sparse; raise --context-tokens or lower "
                "--budgets"
            )
        write_result(campaign.runs / configuration.slug, result)
        self._say(configuration, task.name, f"{result.seconds:.0f} s")
        return result

    def _server(
        self, configuration: Configuration, *, probes: bool
    ) -> contextlib.AbstractContextManager[RunningServer]:
        campaign = self._campaign
        settings = campaign.settings_of(configuration)
        if configuration.system != "sglang":
            return tandem_server(settings, self._stop, probes=probes)
        return stock_server(
            settings,
            model_dir=campaign.model_dir,
            device=campaign.device,
            dtype=campaign.dtype,
            more_args=campaign.request.dense_argv,
            stop=self._stop,
        )

    def _advance(self, samples: Sequence[Sample]) -> None:
        with self._lock:
            self._answers += len(samples)
            work = sum(map(work_of, samples))
            self._progress.update(self._bar, advance=work, answers=self._answers)

    def _say(self, configuration: Configuration, task: str, text: str) -> None:
        line = f"{configuration.slug}  {task}  {text}"
        self._console.print(line, markup=False, soft_wrap=True)


def _continuations(results: _Results) -> _Continuations:
    return {
        name: {answer.name: answer.tokens for answer in result.answers if answer.tokens}
        for name, result in results.items()
    }
