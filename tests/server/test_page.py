"""The built-in page, in a real browser: it shows what the server does, and chats."""

import shutil
import time

import pytest

webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (BROWSER and DRIVER), reason="needs Debian's chromium and chromium-driver"
)


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1360,1000"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(executable_path=DRIVER)
    driver = webdriver.Chrome(options=options, service=service)
    yield driver
    driver.quit()


def until(condition, seconds=15.0):
    deadline = time.perf_counter() + seconds
    while not condition():
        assert time.perf_counter() < deadline
        time.sleep(0.05)


def text(browser, selector):
    """Of all that match; empty while nothing does."""
    return "".join(found.text for found in browser.find_elements("css selector", selector))


def test_the_page_shows_figures_and_plan_and_chats(browser, tiny):
    browser.get(tiny.url + "/")
    until(lambda: text(browser, "#state") in ("idle", "busy"))
    until(lambda: len(browser.find_elements("css selector", "#plan tbody tr")) > 3)
    plan = text(browser, "#plan")
    assert "cpu.attend" in plan
    assert "sparse" in plan
    browser.find_element("css selector", "#max-tokens").clear()
    browser.find_element("css selector", "#max-tokens").send_keys("40")
    browser.find_element("css selector", "#say").send_keys("Hello\n")
    until(lambda: "tokens, first after" in text(browser, ".turn.assistant"))
    assert text(browser, ".turn.user") == "Hello"
    until(lambda: "ms" in text(browser, "#latency") or " s" in text(browser, "#latency"))
    until(lambda: int(text(browser, "#pages-total").replace(",", "")) == 2047)
    wrong = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert wrong == []


def test_an_error_is_shown_in_the_chat(browser, tiny):
    browser.get(tiny.url + "/")
    browser.find_element("css selector", "#max-tokens").clear()
    browser.find_element("css selector", "#max-tokens").send_keys("9999999")
    browser.find_element("css selector", "#say").send_keys("x\n")
    until(lambda: "max_tokens" in text(browser, ".turn.failed"))
