"""Notices that a served bundle's manifest was written (`mdps calibrate`, a new export) and loads the bundle again."""

import asyncio
import logging

from mdps.serving.http.logs import event
from mdps.serving.http.model import Model, Stamp, stamp_of
from mdps.serving.http.refusals import Refusal
from mdps.serving.http.service import Service

_RETRY = 10.0  # seconds between attempts while a bundle cannot be loaded, such as one that is being copied


async def watch(service: Service) -> None:
    """Look at each bundle once in `watch_seconds`, for ever."""
    every = service.options.watch_seconds or 1.0
    tried: dict[str, tuple[Stamp | None, float]] = {}
    while True:
        await asyncio.sleep(every)
        for model in service.models.values():
            stamp = await asyncio.to_thread(stamp_of, model.path)
            if stamp == model.stamp or stamp is None:
                continue
            if service.options.watch_seconds is None:
                _say_once(model)
            elif _is_due(tried.get(model.name), stamp):
                await _reload(model)
                tried[model.name] = (stamp, asyncio.get_running_loop().time())


def _is_due(last: tuple[Stamp | None, float] | None, stamp: Stamp) -> bool:
    return last is None or last[0] != stamp or asyncio.get_running_loop().time() - last[1] > _RETRY


async def _reload(model: Model) -> None:
    try:
        await model.reload()
    except Refusal as refusal:
        event("reload_failed", level=logging.WARNING, model=model.name, error=refusal.sentence)


def _say_once(model: Model) -> None:
    if not model.problem:
        model.problem = f"the bundle changed: POST /v2/repository/models/{model.name}/load to take it up"
        event("reload_needed", level=logging.WARNING, model=model.name, error=model.problem)
