"""The server's state: loading, ready, draining or failed; what is loaded; and the way from a request to a job."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import logging
import platform
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .chat import ChatTemplate, TemplateError
from .errors import ApiError, invalid
from .generation import Generation
from .metrics import Metrics
from .options import Options
from .scheduler import Event, Job, Scheduler
from .schema import Request
from .text import TextDecoder

if TYPE_CHECKING:  # see generation.py: torch is imported by the loading thread
    from tokenizers import Tokenizer

    from ddtree_engine.reference.engine import Decoder

logger = logging.getLogger("ddtree.server")

WARM_UP_PROMPT = "def main():\n"
WARM_UP_TOKENS = 8
DEFAULT_MAX_TOKENS = 16  # of /v1/completions, as OpenAI documents it


class StartError(Exception):
    """The engine cannot start; the text is the one line the operator needs."""


def end_tokens(folder: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """Tokens at which the model itself ends: from generation_config.json, config.json and the tokenizer's eos."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json", "tokenizer_config.json"):
        path = folder / name
        if not path.is_file():
            continue
        config = json.loads(path.read_text(encoding="utf-8"))
        value = config.get("eos_token_id")
        found.update(token for token in (value if isinstance(value, list) else [value]) if isinstance(token, int))
        token = config.get("eos_token")
        written = token.get("content") if isinstance(token, dict) else token
        token_id = tokenizer.token_to_id(written) if isinstance(written, str) else None
        if token_id is not None:
            found.add(token_id)
    return frozenset(found)


class Service:
    """Everything between HTTP and the decoder. Created at once; usable when `status` is "ready"."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.metrics = Metrics()
        self.scheduler = Scheduler(options.max_concurrent, options.max_queue, self.metrics, self._warm_up)
        self.status = "starting"
        self.stage = "loading libraries"
        self.started = time.time()
        self.ready_after: float | None = None
        self.device = ""
        self.decoder: Decoder | None = None
        self._end_tokens: frozenset[int] = frozenset()
        self._loader: threading.Thread | None = None

    # -- starting and stopping -----------------------------------------------------------------------------------

    def load(self, failed: Callable[[], object]) -> None:
        """Starts loading in a thread of its own. `failed` is called when the engine cannot start, or breaks later."""

        def broken() -> None:
            self.status, self.stage = "failed", "the engine broke while decoding"
            self.metrics.ready.set(0)
            failed()

        def work() -> None:
            try:
                self._load(broken)
            except Exception as error:
                self.status, self.stage = "failed", f"{type(error).__name__}: {error}"
                # The traceback first, the one line that matters last: that is where people look.
                known = isinstance(error, StartError | ValueError | OSError)
                logger.error("the engine cannot start: %s", error if known else self.stage, exc_info=not known)
                failed()

        self._loader = threading.Thread(target=work, name="loader", daemon=True)
        self._loader.start()

    def _load(self, broken: Callable[[], object]) -> None:
        import torch  # here and not above: it takes seconds, during which /health already answers

        from ddtree_engine import models
        from ddtree_engine.reference.engine import Decoder, SamplingParams

        options = self.options
        torch.set_num_threads(options.threads)
        self.device = self._pick_device(torch.cuda.is_available())
        self.stage = "loading weights"
        target = models.resolve(options.model, "target")
        draft = None if options.mode == "ar" else models.resolve(options.draft, "draft")
        decoder = Decoder.load(
            target,
            draft,
            mode=options.mode,
            budget=options.budget,
            topk=options.topk,
            device=self.device,
            dtype=getattr(torch, options.dtype),
            context_length=options.context_length,
        )
        self.texts = TextDecoder(decoder.tokenizer)
        self.template = ChatTemplate.of_model(target)
        self._end_tokens = end_tokens(target, decoder.tokenizer)
        self._sampling_params = SamplingParams
        self.decoder = decoder
        self.stage = "first decode"
        self._warm_up()
        self.scheduler.start(broken)
        self.ready_after = round(time.time() - self.started, 3)
        self.stage = ""
        if self.status == "starting":  # a stop may have been asked for meanwhile
            self.status = "ready"
            self.metrics.ready.set(1)
        logger.info(
            "ready after %.1f s: %s on %s, mode %s, budget %d, top-k %d, context %d",
            self.ready_after, options.served_model_name, self.device, options.mode, options.budget, options.topk,
            decoder.context_length,
        )  # fmt: skip

    def _pick_device(self, cuda: bool) -> str:
        wanted = self.options.device
        if wanted == "auto":
            if not cuda:
                logger.warning("no usable GPU: decoding on the CPU (--device auto)")
            return "cuda" if cuda else "cpu"
        if wanted.startswith("cuda") and not cuda:
            raise StartError(f"--device {wanted}, but torch finds no usable GPU: check the driver and the torch build")
        return wanted

    def _warm_up(self) -> None:
        """One real decode: the proof that prefill, drafting and verification work on this machine."""
        decoder = self.decoder
        assert decoder is not None
        prompt = decoder.tokenizer.encode(WARM_UP_PROMPT).ids[: max(1, decoder.context_length - WARM_UP_TOKENS)]
        room = max(1, min(WARM_UP_TOKENS, decoder.context_length - len(prompt)))
        session = decoder.start(prompt, self._sampling_params(max_tokens=room))
        produced = 0
        try:
            finish = None
            while finish is None:
                step = session.step()
                produced += len(step.tokens)
                finish = step.finish
        finally:
            session.close()
        if not produced:
            raise StartError("the first decode produced no token")

    def drain(self) -> None:
        """From now on new completions are refused; those accepted before are finished."""
        self.status = "draining"
        self.metrics.ready.set(0)

    def close(self) -> bool:
        """Ends the decoding thread. False when a thread is still inside the engine and cannot be joined."""
        self.scheduler.stop()
        return not self.scheduler.alive and not (self._loader is not None and self._loader.is_alive())

    # -- what clients ask ----------------------------------------------------------------------------------------

    def health(self) -> tuple[int, dict[str, Any]]:
        """HTTP status and body of /health: 200 only while completions are really served."""
        if self.status != "ready":
            return 503, {"status": self.status, "stage": self.stage}
        if not self.scheduler.alive:
            return 503, {"status": "failed", "stage": "the decoding thread has ended"}
        stalled = self.scheduler.step_seconds()
        if stalled > self.options.stall_seconds:
            return 503, {"status": "stalled", "stage": f"one decoding step has been running for {stalled:.0f} s"}
        return 200, {"status": "ok"}

    def require_ready(self) -> Decoder:
        """The decoder, or the 503 that says why there is none to use."""
        if self.status == "ready" and self.decoder is not None:
            return self.decoder
        if self.status == "draining":
            message = "the server is shutting down and takes no new requests"
        else:
            message = f"the server is not ready: {self.status}, {self.stage}"
        raise ApiError(503, message, code=self.status, headers={"Retry-After": "5"})

    def encode(self, request: Request) -> list[int]:
        """Token ids of the request's prompt. Slow for long prompts: call it off the event loop."""
        decoder = self.require_ready()
        if isinstance(request.prompt, list):
            return request.prompt
        if not request.chat:
            return decoder.tokenizer.encode(request.prompt).ids
        try:
            text = self.template.render(request.messages)
        except TemplateError as error:
            raise invalid(str(error), "messages") from error
        # The template writes the special tokens itself; a second set would change the prompt.
        return decoder.tokenizer.encode(text, add_special_tokens=False).ids

    def job(self, job_id: str, request: Request, prompt: list[int], deliver: Callable[[Event], None]) -> Job:
        """A job for the scheduler. Raises ApiError where the prompt does not fit."""
        decoder = self.require_ready()
        field = "messages" if request.chat else "prompt"
        limit, length = decoder.context_length, len(prompt)
        if not length:
            raise invalid(f"`{field}` is empty; it needs at least one token", field)
        if length >= limit:
            message = (
                f"`{field}` has {length} tokens, but this model's context length is {limit} tokens, "
                "of which at least one is for the answer"
            )
            raise invalid(message, field, "context_length_exceeded")
        room = limit - length
        wanted = request.max_tokens
        if wanted is not None and wanted > room:
            message = (
                f"this model's context length is {limit} tokens, but {length + wanted} were asked for "
                f"({length} in the {field}, {wanted} for the answer); send at most {room} as max_tokens"
            )
            raise invalid(message, field, "context_length_exceeded")
        if wanted is None:
            wanted = room if request.chat else min(DEFAULT_MAX_TOKENS, room)
        ends = request.stop_token_ids if request.ignore_eos else request.stop_token_ids | self._end_tokens
        params = self._sampling_params(
            max_tokens=wanted,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            seed=request.seed,
            stop_token_ids=ends,
        )
        return Job(job_id, lambda: Generation(decoder, self.texts, prompt, params, request.stops), deliver)

    def info(self) -> dict[str, Any]:
        """The body of /get_server_info."""
        options, metrics, scheduler = self.options, self.metrics, self.scheduler
        return {
            "engine": "standalone",
            "status": self.status,
            "stage": self.stage,
            "model": options.model,
            "draft": options.draft,
            "served_model_name": options.served_model_name,
            "mode": options.mode,
            "budget": options.budget,
            "topk": options.topk,
            "block_size": self.decoder.block_size if self.decoder else None,
            "context_length": self.decoder.context_length if self.decoder else options.context_length,
            "max_concurrent": options.max_concurrent,
            "max_queue": options.max_queue,
            "threads": options.threads,
            "device": self.device,
            "dtype": options.dtype,
            "versions": versions(),
            "started_at": self.started,
            "ready_after_seconds": self.ready_after,
            "running_requests": scheduler.running,
            "waiting_requests": scheduler.waiting,
            "finished_requests_total": metrics.finished_total,
            "generated_tokens_total": metrics.generated_total,
            "verify_steps_total": metrics.steps_total,
            "acceptance_length": metrics.acceptance_length,
        }


def versions() -> dict[str, str]:
    """Versions of what decides the output, as installed."""
    found = {"python": platform.python_version()}
    # In a release the engine is a distribution of its own; on a control node it is part of ddtree-fleet.
    for name in ("ddtree_engine", "ddtree-fleet", "torch", "tokenizers", "fastapi", "uvicorn"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
