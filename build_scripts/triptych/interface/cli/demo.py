"""`make demo`: a served pipeline, real requests, and where their time went."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from rich.table import Table

from triptych.client import Client
from triptych.interface.cli.options import Terminal
from triptych.serving.server import Server

SENTENCES = (
    "The parcel arrived broken and the box was wet.",
    "Where is my order? It should have been here yesterday.",
    "I want my money back.",
    "How do I change the password of my account?",
    "Bread rises because yeast turns sugar into carbon dioxide.",
    "Cranes fly in a wedge to save strength.",
    "Wo bleibt meine Bestellung?",
)
QUESTIONS = (
    "my delivery is late",
    "I forgot my login",
    "refund please",
    "why does dough grow?",
    "the goods were damaged in transit",
)


def main(repository: Path, pipeline: str) -> None:
    """Serve `repository`, ask `pipeline` for the nearest sentence of each question, and print."""
    console = Terminal(highlight=False, soft_wrap=True)
    started = time.monotonic()
    with Server(repository) as server, Client(pipeline, server.grpc_url) as client:
        console.print(
            f"tritonserver is ready on {server.grpc_url} (pid {server.pid}) after "
            f"{time.monotonic() - started:.1f} s\n"
        )
        known = client.embed(SENTENCES)
        asked = client.embed(QUESTIONS)
        similarity = asked @ known.T
        table = Table("question", "nearest sentence", "cosine", box=None, header_style="bold")
        for row, question in enumerate(QUESTIONS):
            best = int(similarity[row].argmax())
            table.add_row(question, SENTENCES[best], f"{similarity[row, best]:.3f}")
        console.print(table)
        latencies_ms = []
        for question in QUESTIONS * 10:
            before = time.perf_counter()
            client.embed([question])
            latencies_ms.append((time.perf_counter() - before) * 1000)
        many = [f"{question} ({number})" for number in range(60) for question in QUESTIONS]
        before = time.perf_counter()
        client.embed(many)
        rate = len(many) / (time.perf_counter() - before)
        console.print(
            f"\none text at a time: {sorted(latencies_ms)[len(latencies_ms) // 2]:.1f} ms (median "
            f"of {len(latencies_ms)}); a list of {len(many)} texts: {rate:.0f} texts/s\n"
        )
        table = Table("step", "requests", "mean batch", "queue", "compute", box=None)
        for step in client.step_statistics():
            table.add_row(
                step.model,
                str(step.requests),
                f"{step.mean_batch:.1f}",
                f"{step.queue_us / 1000:.2f} ms",
                f"{step.compute_infer_us / 1000:.2f} ms",
            )
        console.print("Triton's own statistics, mean per request:")
        console.print(table)
    console.print("\nserver stopped")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
