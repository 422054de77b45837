"""Closed-loop load on an OpenAI-compatible server: streams of fixed length, measured at the client.

python bench/load.py --url http://127.0.0.1:8080 --models demo --streams 8 --prompt-words 100 --tokens 64
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from dataclasses import dataclass, field

import aiohttp


@dataclass
class Result:
    """What one model's streams got."""

    tokens: int = 0
    seconds: float = 0.0
    ttft: list[float] = field(default_factory=list)  # seconds
    gaps: list[float] = field(default_factory=list)  # seconds between events of one stream
    errors: list[str] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


async def stream(
    session: aiohttp.ClientSession, url: str, model: str, words: int, tokens: int, salt: int, result: Result
) -> None:
    """One completion of exactly `tokens` tokens."""
    body = {
        "model": model,
        "prompt": f"{salt} " + "the quick brown fox jumps over a lazy dog " * (words // 9 + 1),
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    started = last = time.perf_counter()
    first = True
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            result.errors.append(f"{response.status}: {await response.text()}")
            return
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                result.errors.append(event["error"]["message"])
                return
            now = time.perf_counter()
            if event.get("usage"):
                result.tokens += event["usage"]["completion_tokens"]
            elif first:
                result.ttft.append(now - started)
                first = False
            else:
                result.gaps.append(now - last)
            last = now


async def load(
    url: str, models: list[str], streams: int, words: int, tokens: int, rounds: int = 1
) -> dict[str, Result]:
    """`streams` concurrent streams for each model, `rounds` times over."""
    timeout = aiohttp.ClientTimeout(total=1800)
    results = {model: Result() for model in models}
    async with aiohttp.ClientSession(timeout=timeout) as session:

        async def one(model: str) -> None:
            started = time.perf_counter()
            for turn in range(rounds):
                await asyncio.gather(
                    *(
                        stream(session, url, model, words, tokens, turn * streams + i, results[model])
                        for i in range(streams)
                    )
                )
            results[model].seconds = time.perf_counter() - started

        await asyncio.gather(*(one(model) for model in models))
    return results


def report(results: dict[str, Result]) -> str:
    """A line for each model and their sum."""
    lines = []
    for model, r in results.items():
        ttft = statistics.median(r.ttft) if r.ttft else float("nan")
        gap = statistics.median(r.gaps) if r.gaps else float("nan")
        lines.append(
            f"{model:24} {r.rate:8.1f} tok/s   TTFT p50 {ttft:6.2f} s   gap p50 {gap * 1000:6.0f} ms   "
            f"max {max(r.gaps, default=0) * 1000:6.0f} ms   errors {len(r.errors)}"
        )
        lines += [f"    {error}" for error in r.errors[:3]]
    lines.append(f"{'sum':24} {sum(r.rate for r in results.values()):8.1f} tok/s")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--models", default="demo", help="comma-separated names")
    parser.add_argument("--streams", type=int, default=4, help="concurrent streams for each model")
    parser.add_argument("--prompt-words", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    results = asyncio.run(
        load(args.url, args.models.split(","), args.streams, args.prompt_words, args.tokens, args.rounds)
    )
    sys.stdout.write(report(results) + "\n")


if __name__ == "__main__":
    main()
