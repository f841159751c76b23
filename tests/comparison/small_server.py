"""A small model and a server of it with OpenAI's API, in this process, with planted differences from the
model."""

from __future__ import annotations

import contextlib
import functools
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from fsdp_tune.data.read.file_access import EOS, PAD, builtin_tokenizer

BOS = "<|begin|>"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% "
    "endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WITH_SYSTEM = TEMPLATE.replace("{% for", "<|system|>add numbers<|end|>{% for", 1)
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def write_model(folder: Path, *, seed: int = 0, whole_characters: bool = True) -> None:
    """Write a model whose template begins with BOS and ends turns with `<|end|>`. `whole_characters`: of
    which its answers are made."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=builtin_tokenizer("builtin:arithmetic"), eos_token=EOS, pad_token=PAD
    )
    tokenizer.add_special_tokens(
        {
            "bos_token": BOS,
            "additional_special_tokens": ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"],
        }  # type: ignore[dict-item]
    )
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer), max_position_embeddings=128, initializer_range=0.3, **SIZES
    )
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    model = LlamaForCausalLM(config)
    parts = [token for token in range(len(tokenizer)) if "\ufffd" in str(tokenizer.decode([token]))]
    if whole_characters:
        with torch.no_grad():
            model.lm_head.weight[parts] = 0.0  # some logit is above 0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@dataclass
class Planted:
    """What the server does otherwise than the model."""

    kind: str = "llama.cpp"
    """llama.cpp | vLLM | plain: which endpoints it has."""
    template: str | None = None
    adds_bos: bool = False
    scale: float = 1.0
    key: str | None = None
    takes_ids: bool = True
    returns_logprobs: bool = True
    echoes: bool = False
    gives_ids: bool = True
    ends: tuple[str, ...] = ("<|end|>", EOS)
    dtype: str = "float32"
    penalty: float = 0.0
    """Subtracted from the logits of tokens of the answer so far, before the log-probabilities if
    `is_processed`."""
    top_k: int = 0
    """Tokens that are left, before the log-probabilities if `is_processed`; the least probable of them is
    chosen."""
    is_processed: bool = False
    shift: int = 0
    """By how many positions the log-probabilities of the answer come from later logits."""
    rolled: int = 0
    """By how many positions the log-probabilities of a prompt are late."""
    models: tuple[str, ...] = ("served",)
    answers: dict[str, tuple[int, Any]] = field(default_factory=dict[str, "tuple[int, Any]"])
    """By path: status and body in the place of its own, bytes as they are."""
    location: str | None = None
    """Where every POST is redirected to."""


@functools.cache
def loaded(folder: Path, dtype: str) -> tuple[Any, Any]:
    model = LlamaForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    return model, PreTrainedTokenizerFast.from_pretrained(folder)


class SmallServer:
    def __init__(self, folder: Path, planted: Planted) -> None:
        self.model, self.tokenizer = loaded(folder.resolve(), planted.dtype)
        self.planted = planted
        self.seen: list[tuple[str, dict[str, str], Any]] = []
        """Path, headers and body of each request."""

    def answer(self, path: str, body: Any) -> Any:
        """Return the answer to a path; an int is an error's status."""
        planted, root = self.planted, path.removeprefix("/v1")
        if path == "/v1/models":
            return {"data": [{"id": name} for name in planted.models]}
        if path == "/v1/chat/completions":
            return self.completion(self.prompt_of(body["messages"]), body, is_chat=True)
        if path == "/v1/completions":
            given = body["prompt"]
            if not isinstance(given, str) and not planted.takes_ids:
                return 400
            return self.completion(
                self.encode(given) if isinstance(given, str) else given, body, is_chat=False
            )
        if planted.kind == "llama.cpp" and root == "/props":
            return {"chat_template": TEMPLATE, "bos_token": BOS, "eos_token": EOS, "model_ftype": "all F32"}
        if planted.kind == "llama.cpp" and root == "/apply-template":
            return {"prompt": self.text_of(body["messages"]).removeprefix(BOS)}
        if planted.kind == "llama.cpp" and root == "/tokenize":  # llama.cpp adds BOS itself
            text = body["content"] if body["content"].startswith(BOS) else BOS + body["content"]
            return {"tokens": self.encode(text)}
        if planted.kind == "vLLM" and root == "/tokenize":
            return {
                "tokens": self.prompt_of(body["messages"])
                if "messages" in body
                else self.encode(body["prompt"])
            }
        return 404

    def text_of(self, messages: Any) -> str:
        template = self.planted.template or TEMPLATE
        return str(
            self.tokenizer.apply_chat_template(
                messages, chat_template=template, add_generation_prompt=True, tokenize=False
            )
        )

    def encode(self, text: str) -> list[int]:
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return [self.tokenizer.bos_token_id, *ids] if self.planted.adds_bos else list(ids)

    def prompt_of(self, messages: Any) -> list[int]:
        return self.encode(self.text_of(messages))

    @torch.inference_mode()
    def completion(self, prompt: list[int], body: Any, *, is_chat: bool) -> dict[str, Any]:
        ends = {self.tokenizer.convert_tokens_to_ids(end) for end in self.planted.ends}
        ids = list(prompt)
        reason = "length"
        logits = self.planted.scale * self.model(torch.tensor([ids])).logits[0].float()
        every = [torch.log_softmax(row, -1) for row in logits[:-1]]
        chosen, row = self.processed(logits[-1], [])
        every.append(row)
        for _ in range(body["max_tokens"]):
            ids.append(chosen)
            if ids[-1] in ends:
                reason = "stop"
                break
            logits = self.planted.scale * self.model(torch.tensor([ids])).logits[0, -1].float()
            chosen, row = self.processed(logits, ids[len(prompt) :])
            every.append(row)
        if self.planted.shift:
            shown = every[len(prompt) - 1 :]
            every = [
                *every[: len(prompt) - 1],
                *(shown[min(at + self.planted.shift, len(shown) - 1)] for at in range(len(shown))),
            ]
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
        text = self.tokenizer.decode(ids[len(prompt) :], skip_special_tokens=True)
        choice |= {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        if body.get("logprobs") and self.planted.returns_logprobs:
            echoes = self.planted.echoes and body.get("echo") and not is_chat
            at = [
                (index, every[index - 1] if index else None)
                for index in range(0 if echoes else len(prompt), len(ids))
            ]
            choice["logprobs"] = (
                self.of_chat if is_chat or self.planted.kind == "llama.cpp" else self.of_text
            )(ids, at)
            if self.planted.rolled and echoes:
                given = choice["logprobs"]["token_logprobs"]
                choice["logprobs"]["token_logprobs"] = [
                    None,
                    *given[: len(prompt) - 1],
                    *given[len(prompt) :],
                ]
        return {"choices": [choice], "usage": {"prompt_tokens": len(prompt)}}

    def processed(self, logits: torch.Tensor, before: list[int]) -> tuple[int, torch.Tensor]:
        """Return the token that is chosen after the penalty and among the top-k, and the log-probabilities
        that are returned."""
        changed = logits.clone()
        changed[before] -= self.planted.penalty
        chosen = int(changed.argmax())
        if self.planted.top_k:
            kept = changed.topk(self.planted.top_k).indices
            chosen = int(kept[-1])
            changed = torch.full_like(changed, -torch.inf).index_copy(0, kept, changed[kept])
        return chosen, torch.log_softmax(changed if self.planted.is_processed else logits, -1)

    def piece(self, token: int) -> str:
        return f"token_id:{token}" if self.planted.kind == "vLLM" else str(self.tokenizer.decode([token]))

    def of_chat(self, ids: list[int], at: list[tuple[int, Any]]) -> Any:
        def shown(token: int, row: Any) -> dict[str, Any]:
            own = {"id": token} if self.planted.gives_ids and self.planted.kind == "llama.cpp" else {}
            return {"token": self.piece(token), "logprob": float(row[token]), **own}

        return {
            "content": [
                shown(ids[index], row)
                | {"top_logprobs": [shown(token, row) for token in row.topk(5).indices.tolist()]}
                for index, row in at
            ]
        }

    def of_text(self, ids: list[int], at: list[tuple[int, Any]]) -> Any:
        return {
            "tokens": [self.piece(ids[index]) for index, _ in at],
            "token_logprobs": [None if row is None else float(row[ids[index]]) for index, row in at],
            "top_logprobs": [
                None if row is None else {self.piece(t): float(row[t]) for t in row.topk(5).indices.tolist()}
                for _, row in at
            ],
        }


@contextlib.contextmanager
def serving(folder: Path, planted: Planted) -> Iterator[tuple[str, SmallServer]]:
    """Serve a model on this machine; yields the address of the API and the server."""
    server = SmallServer(folder, planted)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.respond(None)

        def do_POST(self) -> None:
            self.respond(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def respond(self, body: Any) -> None:
            server.seen.append((self.path, dict(self.headers), body))
            status, found = planted.answers.get(self.path, (200, None))
            if planted.key is not None and self.headers["Authorization"] != f"Bearer {planted.key}":
                status, found = 401, {"error": {"message": f"wrong key: {self.headers['Authorization']}"}}
            if planted.location is not None and body is not None:
                status = 307
            if found is None:
                found = server.answer(self.path, body)
                status, found = (
                    (found, {"detail": "no such thing"}) if isinstance(found, int) else (status, found)
                )
            raw = found if isinstance(found, bytes) else json.dumps(found).encode()
            self.send_response(status)
            if status == 307:
                self.send_header("Location", planted.location or "")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *_: Any) -> None: ...

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_address[1]}/v1", server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
