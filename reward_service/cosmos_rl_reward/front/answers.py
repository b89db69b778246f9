"""What is said about a job: one place, used by both protocols."""

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from cosmos_rl_reward.front.job_tracker import JobTracker
from cosmos_rl_reward.payload.metadata import REWARD_NAME
from cosmos_rl_reward.results import FAILED, without_scores
from cosmos_rl_reward.spool import JOB_ID, Job
from cosmos_rl_reward.store import call_spool

MAX_WAIT_S = 60.0


@dataclass(frozen=True)
class Answer:
    """State of one reward of a job. ``result`` is the stored JSON when the state is final, else None.

    ``state`` is ``unknown``, ``queued``, ``succeeded``, ``failed``, ``expired`` or ``cancelled``.
    """

    state: str
    result: bytes | None = None
    position: int | None = None


async def get_answer(tracker: JobTracker, job_id: str, reward: str, wait_s: float = 0.0) -> Answer:
    """The state of a reward of a job; waits up to ``wait_s`` (at most 60 s) for a final one."""
    if not JOB_ID.fullmatch(job_id) or not REWARD_NAME.fullmatch(reward):
        return Answer("unknown")
    entry = tracker.open.get(job_id)
    if entry is None or reward not in entry.missing:
        data = await call_spool(tracker.spool, tracker.spool.result, job_id, reward)
        if data is not None:
            return Answer(read_state(data), data)
    job = await find_job(tracker, job_id)
    if job is None:
        return Answer("unknown")
    if reward not in job.rewards:
        error = f"the job did not ask for reward {reward}; it asked for {', '.join(job.rewards)}"
        if reward in job.dropped:
            error = f"reward {reward} was not scored: its weight in reward_fn is not above 0"
        return Answer(FAILED, without_scores(reward, FAILED, error))
    if wait_s > 0:
        await tracker.wait(job_id, reward, min(wait_s, MAX_WAIT_S))
    data = await call_spool(tracker.spool, tracker.spool.result, job_id, reward)
    if data is None:
        return Answer("queued", position=tracker.position(job_id, reward))
    return Answer(read_state(data), data)


def read_state(data: bytes) -> str:
    """State in a stored result."""
    return json.loads(data)["state"]


async def describe_job(tracker: JobTracker, job_id: str, wait_s: float = 0.0) -> dict[str, Any] | None:
    """All rewards of a job at once; None when the job is not known (any more)."""
    job = await find_job(tracker, job_id)
    if job is None:
        return None
    return await collect_results(tracker, job, wait_s)


async def find_job(tracker: JobTracker, job_id: str) -> Job | None:
    """A job by its id; from the disk only when it is not open here."""
    entry = tracker.open.get(job_id)
    if entry is not None:
        return entry.job
    return await asyncio.to_thread(tracker.spool.job, job_id)


async def collect_results(tracker: JobTracker, job: Job, wait_s: float) -> dict[str, Any]:
    """All rewards of a job that is there."""
    loop = asyncio.get_running_loop()
    end = loop.time() + min(wait_s, MAX_WAIT_S)
    rewards: dict[str, Any] = {}
    for name in job.rewards:
        answer = await get_answer(tracker, job.id, name, max(0.0, end - loop.time()))
        rewards[name] = json.loads(answer.result) if answer.result else {"state": answer.state}
        if answer.position is not None:
            rewards[name]["position"] = answer.position
    states = {rewards[name]["state"] for name in job.rewards}
    order = ("queued", "failed", "expired", "cancelled", "succeeded")
    return {"id": job.id, "state": next(s for s in order if s in states), "rewards": rewards}
