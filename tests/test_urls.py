"""URLs of stores: what is opened, and what people get to see of them."""

from urllib.parse import quote

import pytest
from typer.testing import CliRunner

import refold
from refold.cli import app
from refold.core.errors import SettingError
from refold.stores.store import open_store
from refold.stores.url import shown_url

SECRETS = [
    "postgresql://u:S3CRET@h/db",
    "postgresql://h/db?user=u&password=S3CRET",
    "postgresql://u:S3CRET@h/db?sslpassword=S3CRET",
    "postgresql://u:x@h/db?password=S3CRET@S3CRET",
    "redis://:x/S3CRET@h:1/0",
    "redis://u:x:S3CRET@h",
    "redis://u:x?S3CRET@h",
    "redis://u:S3CRET%40S3CRET@h",
    "mem0://bob?key=S3CRET&record=sqlite:///a.db",
    "mem0://bob?host=https://S3CRET@h",
    "mem0://bob?host=u:S3CRET@h",
    "sqlite://S3CRET@/x",
    "agentcore://a:S3CRET@M/A",
    "agentcore://S3CRET@M/A",
]


@pytest.mark.parametrize("url", SECRETS)
def test_no_password_and_no_key_is_shown_also_not_that_of_a_url_inside(url):
    memory = quote("mem0://x?record=" + quote(url, safe=""), safe="")
    for one in (
        url,
        f"hybrid://?record={quote(url, safe='')}&memory=x",
        f"hybrid://?memory={memory}&record=y",
    ):
        assert "S3CRET" not in shown_url(one)
        assert "***" in shown_url(one)


@pytest.mark.parametrize(
    "url",
    [
        *(
            "sqlite:///a.db",
            "sqlite:////srv/a@b/c.db",
            "memory://",
            "redis://h:6379/0",
            "mem0://bob@example.com",
        ),
        *("postgresql://app@/db?host=/run", "agentcore://M/A"),
    ],
)
def test_what_has_no_secret_is_shown_as_it_is(url):
    assert shown_url(url) == url


@pytest.mark.parametrize("url", ["", "nowhere://x", "file.db", "postgresql//x", "http://[", "sqlite://"])
def test_what_is_no_store_is_told_with_what_there_is(url):
    with pytest.raises(SettingError, match=r"expected|is not a valid URL"):
        open_store(url)


@pytest.mark.parametrize(
    "url", ["memory://?x=1", "memory://name?x=1", "memory://a/b", "memory:///a", "memory://#x"]
)
def test_memory_has_no_options(url):
    with pytest.raises(SettingError, match="has no options"):
        open_store(url)


def test_an_option_that_is_not_known_is_told_with_those_that_are(tmp_path):
    inner = quote("memory://?x=1", safe="")
    for url, known in (
        (f"sqlite:///{tmp_path}/a.db?x=1", "synchronous, timeout_s"),
        ("postgresql://h/db?x=1", "pool_size, timeout_s"),
        ("redis://h?x=1", "ttl_s, wait_aof"),
        ("agentcore://M/A?x=1", "region, long_term"),
        ("mem0://a?key=k&x=1", "infer, recall"),
        ("hybrid://?record=a&memory=b&x=1", "sync, batch_size"),
        (f"mem0://a?key=k&record={inner}", "memory://NAME"),
    ):
        with pytest.raises(SettingError) as error:
            open_store(url)
        assert known in str(error.value)


REFUSED = [
    "sqlite://S3CRET@/x",
    "sqlite:///a.db?key=S3CRET",
    "agentcore://a:S3CRET@M/A",
    "agentcore://M/A?secret_key=S3CRET",
    "agentcore://M/A?token=S3CRET&long_term=2",
    "mem0://a?key=k&host=ftp%3A%2F%2Fu%3AS3CRET%40h",
    "mem0://a?key=k&host=u%3AS3CRET%40h",
    "mem0://a?key=S3CRET&timeout_s=0",
    "mem0://u:S3CRET@[x",
]


@pytest.mark.parametrize("url", REFUSED)
def test_no_error_shows_a_password_or_a_key_also_not_from_inside_another_url(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    memory, record = quote(url, safe=""), quote(f"sqlite:///{tmp_path}/a.db", safe="")
    urls = [url, f"hybrid://?record={record}&memory={memory}", f"mem0://a?key=k&record={memory}"]
    for one in urls:
        with pytest.raises(SettingError) as error:
            open_store(one)
        assert "S3CRET" not in str(error.value)
        assert error.value.__cause__ is None


def test_a_worker_opens_the_url_that_it_was_given(monkeypatch):
    opened = []
    monkeypatch.setattr("refold.session.worker.run", lambda url, **rest: opened.append(url))
    run = CliRunner().invoke(app, ["worker", "--store", SECRETS[0], "--once"])
    assert (run.exit_code, opened) == (0, [SECRETS[0]])
    assert "S3CRET" not in run.output


def test_a_session_opens_what_its_url_says(tmp_path):
    assert type(refold.open("a", store=f"sqlite:///{tmp_path}/a.db").store).__name__ == "SQLiteStore"
