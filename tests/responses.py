"""The stream of /v1/responses as a client has it in the end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def put_together(told: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The output items as a client has them that believes in deltas alone, each held to what its end says."""
    items: list[dict[str, Any]] = []
    for event in told:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            items.append(event["item"])
            assert event["item"].get("content", []) == []
            assert event["item"].get("arguments", "") == ""
            continue
        if "output_index" not in event:
            continue
        item = items[event["output_index"]]
        assert event.get("item_id", item["id"]) == item["id"]
        match kind:
            case "content_part.added":
                assert event["content_index"] == len(item["content"])
                item["content"].append(event["part"])
            case "output_text.delta" | "reasoning_text.delta":
                part = item["content"][event["content_index"]]
                part["text"] += event["delta"]
                part.setdefault("logprobs", []).extend(event.get("logprobs", []))
                if kind == "reasoning_text.delta":
                    assert part.pop("logprobs") == []
            case "output_text.done":
                assert [event["text"], event["logprobs"]] == [item["content"][0][key] for key in ("text", "logprobs")]
            case "reasoning_text.done":
                assert event["text"] == item["content"][0]["text"]
            case "content_part.done":
                assert event["part"] == item["content"][event["content_index"]]
            case "function_call_arguments.delta":
                item["arguments"] += event["delta"]
            case "function_call_arguments.done":
                assert event["arguments"] == item["arguments"]
            case "output_item.done":
                item["status"] = event["item"]["status"]
                assert event["item"] == item
            case other:
                raise AssertionError(other)
    return items
