//! `baton shell` on a real terminal, in a real sandbox, which moves meanwhile.

use crate::{commandline::Person, proxy::Proxy, pty::Terminal, servers::Machine, transfer::soon};

#[tokio::test(flavor = "multi_thread")]
async fn a_shell_feels_local_and_goes_on_when_the_sandbox_moves() {
    let machine = Machine::with_a_directory().await;
    let (one, two) = tokio::join!(machine.server("one"), machine.server("two"));
    let proxy = Proxy::start(&one, 0, 0).await;
    let person = Person::at(&machine, proxy.url());
    let id = person.gets(&["create", "--checkpoint", "--handoff"]).await.trim().to_owned();
    let mut terminal = Terminal::open();
    let before = terminal.manners();
    let (url, home) = (proxy.url(), person.home.to_str().unwrap().to_owned());
    let settings = [("BATON_URL", url.as_str()), ("HOME", home.as_str())];
    let mut child = terminal.run(env!("CARGO_BIN_EXE_baton"), &["shell", &id], &settings);
    // What is typed comes back too: what is waited for stands nowhere in it.
    terminal.press(b"echo $TERM $((6 * 7)); stty size\r");
    // Both may come in one piece: the later one is waited for.
    assert!(terminal.shows("30 100").await.contains("vt100 42"));
    assert!(terminal.is_raw());
    terminal.resize(120, 40);
    terminal.press(b"until [ \"$(stty size)\" = '40 120' ]; do sleep 0.1; done; echo is-$((40 + 120))\r");
    terminal.shows("is-160").await;
    terminal.press(b"kept=here; echo asleep-$((1 + 1)); sleep 600\r");
    terminal.shows("asleep-2").await;
    // Ctrl-C ends what runs in the shell, and not the shell.
    terminal.press(b"\x03");
    terminal.press(b"echo code-$?-$((2 + 2))\r");
    terminal.shows("code-130-4").await;

    let epoch = machine.lock(&id)["epoch"].as_u64().unwrap();
    proxy.lead_to(&two);
    terminal.press(b"echo $kept-$((3 + 3))\r");
    terminal.shows("here-6").await;
    assert!(machine.lock(&id)["epoch"].as_u64().unwrap() > epoch, "it did not move");
    terminal.press(b"exit 7\r");
    assert_eq!(soon(child.wait()).await.unwrap().code(), Some(7));
    assert_eq!(terminal.manners(), before);
    person.gets(&["kill", &id]).await;
    one.stop().await;
    two.stop().await;
}
