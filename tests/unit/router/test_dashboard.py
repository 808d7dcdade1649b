"""The dashboard's numbers, and its page in a real browser."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from kvduplex_router.dashboard.samples import Sample, parse, quantile, summary

KEY = {"authorization": "Bearer admin-secret"}
EXPOSITION = """
kvduplex_router_turns_total{{api="chat",outcome="ok",plan="pull"}} {pull}
kvduplex_router_turns_total{{api="chat",outcome="ok",plan="recompute"}} 4.0
# TYPE kvduplex_router_prompt_tokens counter
kvduplex_router_prompt_tokens_total{{class="chat"}} {prompt}
kvduplex_router_prompt_tokens_total{{class="rag"}} 7.0
kvduplex_router_cached_tokens_total{{class="chat"}} {cached}
kvduplex_router_queued 2.0
"""


def sample(at: float, **values: float) -> Sample:
    return parse(EXPOSITION.format(**values).encode(), at)


def test_two_looks_give_rates_and_shares_of_the_time_between_them() -> None:
    before, now = sample(10, pull=1, prompt=100, cached=50), sample(20, pull=21, prompt=300, cached=200)
    seen = summary(now, before)
    assert (seen["turns_per_s"], seen["plans"], seen["queued"]) == (2.0, {"pull": 20.0}, 2.0)
    assert (seen["hit_rate"], seen["window_s"]) == (0.75, 10)
    assert seen["classes"] == [{"name": "chat", "prompt_tokens": 200.0, "hit_rate": 0.75}]


def test_a_restarted_counter_counts_from_zero() -> None:
    seen = summary(sample(20, pull=3, prompt=10, cached=5), sample(10, pull=9, prompt=100, cached=50))
    assert seen["hit_rate"] == pytest.approx(5 / 17)


def test_what_is_not_known_is_missing_and_not_0() -> None:
    first = summary(sample(10, pull=1, prompt=1, cached=1), None)
    unknown = ("turns_per_s", "plans", "refusals", "hit_rate", "ttft_p50_s", "state_up", "leases_renewed", "workers")
    assert all(first[name] is None for name in unknown)
    idle = summary(sample(20, pull=1, prompt=1, cached=1), sample(10, pull=1, prompt=1, cached=1))
    assert (idle["hit_rate"], idle["ttft_p50_s"], idle["classes"], idle["turns_per_s"]) == (None, None, [], 0.0)


def test_quantiles_of_buckets() -> None:
    assert quantile([(1.0, 0.0), (2.0, 10.0), (float("inf"), 10.0)], 0.5) == 1.5
    assert quantile([(1.0, 0.0), (float("inf"), 4.0)], 0.5) == 1.0
    assert quantile([(1.0, 0.0), (float("inf"), 0.0)], 0.5) is None
    assert quantile([], 0.5) is None


# -- over HTTP ---------------------------------------------------------------------------------------------------


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("ADMIN_KEY", "admin-secret")
    return {"admin": {"key_env": "ADMIN_KEY"}}


async def next_look(reader: asyncio.StreamReader) -> Any:
    async with asyncio.timeout(10):
        while not (line := await reader.readline()).startswith(b"data: "):
            assert line
    return json.loads(line[6:])


async def test_the_events_need_the_admin_key_and_the_page_does_not(make_cluster: Any, key: Any) -> None:
    router = await make_cluster(**key)
    page = await router.client("/dashboard")
    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert b"http://" not in page.body.replace(b"http://www.w3.org/2000/svg", b"")
    assert b"https://" not in page.body
    assert (await router.client("/dashboard/events")).status == 401
    reader, writer = await router.client.send("/dashboard/events", None, KEY)
    look = await next_look(reader)
    assert [engine["name"] for engine in look["engines"]] == ["prefill0", "decode0"]
    assert (look["ready"], look["engines"][0]["kv_usage"], look["hit_rate"]) == (True, None, None)
    writer.close()


async def test_without_a_key_it_is_as_open_as_the_metrics(make_cluster: Any) -> None:
    router = await make_cluster()
    reader, writer = await router.client.send("/dashboard/events")
    assert (await next_look(reader))["ready"]
    writer.close()


async def test_nobody_looks_when_nobody_watches_and_streams_end_with_the_router(make_cluster: Any, tools: Any) -> None:
    router = await make_cluster()
    feed = router.router.feed
    feed._interval_s = 0.02
    streams = [await router.client.send("/dashboard/events") for _ in range(3)]
    for reader, _ in streams:
        await next_look(reader)
    for _, writer in streams[:2]:
        writer.close()
    await tools.eventually(lambda: feed._watchers == 1, "the others left")
    async with asyncio.timeout(10):
        await feed.close()
        await streams[2][0].readuntil(b"\r\n0\r\n\r\n")
    streams[2][1].close()
    assert feed._task is not None
    assert feed._task.done()


# -- in a browser ------------------------------------------------------------------------------------------------


@pytest.fixture
async def browser() -> AsyncIterator[Any]:
    playwright = pytest.importorskip("playwright.async_api", reason="playwright is not installed (extra 'dev')")
    binary = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if binary is None:
        missing = "no Chromium here; install one (Debian: apt-get install chromium)"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(missing)
    async with playwright.async_playwright() as driver:
        running = await driver.chromium.launch(executable_path=binary, args=["--no-sandbox", "--disable-gpu"])
        yield running
        await running.close()


def facts(block_size: int, usage: str, version: str = "0.32.0") -> dict[str, Any]:
    metrics = (
        f'\nvllm:cache_config_info{{block_size="{block_size}",cache_dtype="auto"}} 1.0\n'
        f"vllm:num_requests_running 3.0\nvllm:num_requests_waiting 0.0\n{usage}"
    )
    return {"/version": {"version": version}, "/metrics": metrics.encode(), "root": "/models/m"}


NAME = "decode-old"
ODD_VERSION = "0.32.0" if "KVDUPLEX_SCREENSHOTS" in os.environ else "0.32.0<b>odd</b>"
SIZES = {"wide": {"width": 1180, "height": 900}, "phone": {"width": 390, "height": 844}}


def fresh_prompts(_completion: int = 1) -> dict[str, Any]:
    """What an engine counts of long prompts of which little is cached."""
    details = {"cached_tokens": 300}
    return {"prompt_tokens": 1000, "completion_tokens": 1, "total_tokens": 1001, "prompt_tokens_details": details}


async def test_the_page_in_a_browser(make_cluster: Any, key: Any, browser: Any, tools: Any, tmp_path: Path) -> None:
    router = await make_cluster(prefill=2, decode=2, routing={"policy": "prefix"}, **key)
    for engine, use in zip(
        [*router.prefill, *router.decode], ("", "vllm:kv_cache_usage_perc 0.32\n", "vllm:kv_cache_usage_perc 0.91\n",
        "vllm:kv_cache_usage_perc 0.64\n"), strict=True,
    ):  # fmt: skip
        engine.facts = facts(32, use)
        engine.usage = fresh_prompts
    for engine in router.router.fleet.engines:
        engine.traits = None  # it is asked again
    odd = tools.Engine("odd")
    odd.facts = facts(16, "vllm:kv_cache_usage_perc 0\n", ODD_VERSION)
    await odd.start()
    router.router.feed._interval_s = 0.1
    complaints: list[str] = []
    try:
        await router.client("/admin/engines", {"url": odd.url, "name": NAME, "role": "decode"}, KEY)
        context = await browser.new_context(viewport=SIZES["wide"], color_scheme="light")
        page = await context.new_page()
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        await page.goto(f"http://127.0.0.1:{router.client.port}/dashboard")
        await page.get_by_label("Admin key").fill("wrong")
        await page.get_by_role("button").click()
        await page.get_by_text("That key is not known here.").wait_for(timeout=10_000)
        complaints.clear()  # the refusals themselves
        await page.get_by_label("Admin key").fill("admin-secret")
        await page.get_by_role("button").click()
        await page.get_by_text("ready", exact=True).wait_for(timeout=10_000)
        assert await page.get_by_text("Known after the next look.").count() in (0, 2)
        for turn in range(8):
            history = ["hi", *["Hello there", "more"] * turn]
            for conversation in range(4):
                await router.client.chat(tools.chat_body(*history), conversation_id=f"c{conversation}", stream=True)
            await asyncio.sleep(float(os.environ.get("KVDUPLEX_SCREENSHOT_PACE_S", "0")))  # for curves in the docs
        await page.locator("#plans").get_by_text("pull").wait_for(timeout=10_000)
        doctor_says = page.locator("#classes").get_by_text("of prompt tokens were held by no engine")
        await doctor_says.wait_for(timeout=10_000)
        engines = page.locator("#engines tr")
        await page.get_by_text("left out").wait_for(timeout=10_000)
        assert await engines.count() == 5
        silent = engines.filter(has=page.locator("strong", has_text="prefill0"))
        unknown = await silent.locator("td").last.inner_text()
        assert unknown.strip() == "\N{EN DASH}", "an engine that does not say how full it is, is not empty"
        assert (await engines.filter(has_text=NAME).locator("td").last.inner_text()).strip() == "0 %"
        shown = await engines.filter(has_text=NAME).locator(".why").inner_text()
        assert ODD_VERSION in shown, "what engines say is text"
        await shots(page, tmp_path)
        assert complaints == []
        await context.close()
    finally:
        await odd.stop()


async def shots(page: Any, folder: Path) -> None:
    """Pictures of both widths and schemes; nothing may be wider than the screen."""
    kept = Path(os.environ.get("KVDUPLEX_SCREENSHOTS", folder))
    for name, scheme in product(SIZES, ("light", "dark")):
        await page.set_viewport_size(SIZES[name])
        await page.emulate_media(color_scheme=scheme)
        wider = await page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wider <= 0, f"{name} scrolls sideways"
        picture = await page.screenshot(full_page=True, path=str(kept / f"dashboard-{name}-{scheme}.png"))
        assert len(picture) > 5_000
