"""A browser for tests of pages: Chromium without a window, driven by Selenium. A test that opens
one is marked with `needs_browser`, and skipped where there is none."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pytest

from tests.support.waiting import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from selenium.webdriver import Chrome
    from selenium.webdriver.remote.webelement import WebElement

Read = TypeVar("Read")
CHROMIUM, CHROMEDRIVER = shutil.which("chromium"), shutil.which("chromedriver")

needs_browser = pytest.mark.skipif(
    None in (CHROMIUM, CHROMEDRIVER, find_spec("selenium")),
    reason="no chromium with its driver, or no selenium here: "
    "apt-get install chromium chromium-driver; pip install selenium",
)

# By WCAG 2: relative luminances, the lighter one by the darker one.
_CONTRAST = """
const luminance = (color) => {
  const parts = color.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255);
  const linear = parts.map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
};
const clear = (element) => getComputedStyle(element).backgroundColor.endsWith(", 0)");
let behind = arguments[0];
while (behind.parentElement && clear(behind)) behind = behind.parentElement;
const colors = [getComputedStyle(arguments[0]).color, getComputedStyle(behind).backgroundColor];
const [dark, light] = colors.map(luminance).sort((a, b) => a - b);
return (light + 0.05) / (dark + 0.05);
"""


class Browser:
    """One page at a time, by CSS selectors; what it waits for comes within `PATIENCE_S`."""

    def __init__(self, driver: "Chrome") -> None:
        self.driver = driver

    def open(self, url: str) -> None:
        """Returns when the page and its scripts are loaded."""
        self.driver.get(url)

    def find(self, selector: str) -> "WebElement":
        """The first element; an error if there is none."""
        return self.driver.find_element("css selector", selector)

    def texts(self, selector: str) -> list[str]:
        """What a person reads in each element; what is hidden reads as nothing."""
        return self._read(
            lambda: [each.text for each in self.driver.find_elements("css selector", selector)]
        )

    def text(self, selector: str) -> str:
        """What a person reads in the first element."""
        return self._read(lambda: self.find(selector).text)

    def _read(self, what: Callable[[], Read]) -> Read:
        """Again, if the page was drawn anew between finding an element and reading it."""
        from selenium.common.exceptions import StaleElementReferenceException

        while True:
            with suppress(StaleElementReferenceException):
                return what()

    def value(self, selector: str) -> str:
        """What stands in a field."""
        return str(self.find(selector).get_property("value"))

    def click(self, selector: str) -> None:
        """An error if something lies above it, or if it cannot be seen."""
        self.find(selector).click()

    def write(self, selector: str, text: str) -> None:
        """Types the text in place of what stood in the field."""
        field = self.find(selector)
        field.clear()
        field.send_keys(text)

    def wait_for(self, selector: str, part: str = "") -> str:
        """What the first element reads, once it is there, can be seen, and `part` is in it."""

        def shown() -> bool:
            return any(text and part in text for text in self.texts(selector))

        wait_until(shown, f"{selector} with {part!r}", pause_s=0.05)
        return next(text for text in self.texts(selector) if text and part in text)

    def faults(self) -> list[str]:
        """Errors in the page's console since last asked: a script's, and answers of 4xx and 5xx."""
        entries = self.driver.get_log("browser")
        return [each["message"] for each in entries if each["level"] == "SEVERE"]

    def resize(self, width: int, height: int = 900) -> None:
        """Show the page at this size in CSS pixels; a phone has a width of about 390."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def prefer(self, colors: str) -> None:
        """Show the page as to a person who prefers `light` or `dark`."""
        feature = {"name": "prefers-color-scheme", "value": colors}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    def overflow(self) -> int:
        """By how many pixels the page is wider than the screen."""
        script = "const e = document.documentElement; return e.scrollWidth - e.clientWidth"
        return int(self.driver.execute_script(script))

    def contrast(self, *selectors: str) -> float:
        """The least contrast of text to its background, 1 to 21; 4.5 is what WCAG asks for."""
        return min(float(self.driver.execute_script(_CONTRAST, self.find(s))) for s in selectors)

    def picture(self, path: Path) -> None:
        """Save what is on the screen as a PNG."""
        path.write_bytes(self.driver.get_screenshot_as_png())


@contextmanager
def open_browser() -> Iterator[Browser]:
    """A browser with nothing open, and a profile of its own."""
    from selenium.webdriver import Chrome, ChromeOptions, ChromeService

    options = ChromeOptions()
    options.binary_location = str(CHROMIUM)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        for argument in (
            "--headless=new",
            "--no-sandbox",  # root, whom containers run tests as, is refused one
            "--disable-dev-shm-usage",  # of 64 MB in containers
            "--disable-gpu",
            "--force-prefers-reduced-motion",  # what glides is not where it was clicked
            "--no-proxy-server",
            "--window-size=1280,900",
            f"--user-data-dir={profile}",
        ):
            options.add_argument(argument)
        driver = Chrome(options, ChromeService(CHROMEDRIVER))
        try:
            driver.set_page_load_timeout(PATIENCE_S)
            yield Browser(driver)
        finally:
            driver.quit()
