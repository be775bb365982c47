//! Commands: how they end, what they print and take.

use std::time::Duration;

use baton_client::{Error, Exec, Language};
use serde_json::Value;

use super::{Scene, bash, cases, rest, taken, text, until};

fn words(value: &Value) -> Vec<String> {
    value.as_array().unwrap().iter().map(|word| word.as_str().unwrap().to_owned()).collect()
}

/// The command of a case; `None` for a language that has no name here at all.
fn command_of(case: &Value) -> Option<Exec> {
    let mut exec = match (&case["argv"], case["language"].as_str().unwrap_or("bash")) {
        (Value::Null, language) => Exec::code(Language::parse(language)?, case["code"].as_str().unwrap()),
        (argv, _) => Exec::argv(words(argv)),
    };
    let options = &case["options"];
    for (name, value) in options["env"].as_object().into_iter().flatten() {
        exec = exec.env(name, value.as_str().unwrap());
    }
    if let Some(cwd) = options["cwd"].as_str() {
        exec = exec.cwd(cwd);
    }
    if let Some(user) = options["user"].as_str() {
        exec = exec.user(user);
    }
    if let Some(pty) = options["pty"].as_array() {
        let side = |at: usize| u16::try_from(pty[at].as_u64().unwrap()).unwrap();
        exec = exec.pty(side(0), side(1));
    }
    if let Some(timeout) = options["timeout"].as_f64() {
        exec = exec.timeout(Duration::from_secs_f64(timeout));
    }
    Some(if options["stdin"].is_string() { exec.stdin() } else { exec })
}

pub async fn commands_end_as_the_table_says() {
    let scene = Scene::new().await;
    for case in cases()["execs"].as_array().unwrap() {
        let running = scene.sandbox.exec(command_of(case).unwrap()).await.unwrap();
        if let Some(stdin) = case["options"]["stdin"].as_str() {
            running.write_stdin(stdin.to_owned()).await.unwrap();
            running.close_stdin();
        }
        let ended = running.collect().await.unwrap();
        let said = |name: &str| case[name].as_str().unwrap_or_default().to_owned();
        assert_eq!(
            (text(&ended.stdout), text(&ended.stderr)),
            (said("stdout").as_str(), said("stderr").as_str()),
            "{case}"
        );
        let code = if case.get("exit_code").is_some() { case["exit_code"].as_i64() } else { Some(0) };
        assert_eq!(ended.outcome.exit_code.map(i64::from), code, "{case}");
        assert_eq!(ended.outcome.signal.map(i64::from), case["signal"].as_i64(), "{case}");
        assert_eq!(ended.outcome.timed_out, case["timed_out"].as_bool().unwrap_or(false), "{case}");
        assert!(ended.outcome.duration.is_some() && ended.lost == 0, "{case}");
    }
    let code = scene.sandbox.run_code(Language::Python, "print(1)").await.unwrap();
    assert_eq!(code.stdout, b"1\n");
    scene.end().await;
}

pub async fn what_cannot_start_is_refused() {
    let scene = Scene::new().await;
    for case in cases()["refused"].as_array().unwrap() {
        let Some(exec) = command_of(case) else { continue };
        let refused = scene.sandbox.exec(exec).await.map(|running| running.id().clone());
        assert!(matches!(refused, Err(Error::Refused { .. })), "{case}: {refused:?}");
    }
    assert!(scene.sandbox.run(bash("echo still here")).await.unwrap().outcome.is_success());
    scene.end().await;
}

pub async fn output_comes_while_the_command_runs() {
    let scene = Scene::new().await;
    let mut running =
        scene.sandbox.exec(bash("echo one; read line; echo got $line; echo err >&2").stdin()).await.unwrap();
    let mut stdout = taken(&mut running);
    assert_eq!(until(&mut stdout, "\n").await, "one\n");
    running.write_stdin("more\n").await.unwrap();
    assert_eq!(rest(&mut stdout).await, "got more\n");
    let ended = running.collect().await.unwrap();
    assert_eq!((text(&ended.stdout), text(&ended.stderr), ended.outcome.exit_code), ("", "err\n", Some(0)));
    scene.end().await;
}

pub async fn commands_run_side_by_side() {
    let scene = Scene::new().await;
    let all = (0..8).map(|number| scene.sandbox.run(bash(&format!("sleep 0.3; echo {number}"))));
    let all = futures::future::try_join_all(all).await.unwrap();
    let said: Vec<_> = all.iter().map(|ended| text(&ended.stdout)).collect();
    assert_eq!(said, ["0\n", "1\n", "2\n", "3\n", "4\n", "5\n", "6\n", "7\n"]);
    scene.end().await;
}

pub async fn input_is_taken_as_it_is_written() {
    let scene = Scene::new().await;
    let mut running = scene.sandbox.exec(Exec::argv(["tr", "a-z", "A-Z"]).stdin()).await.unwrap();
    for part in ["hello ", "wor", "ld"] {
        running.write_stdin(part).await.unwrap();
    }
    running.close_stdin();
    assert_eq!(rest(&mut taken(&mut running)).await, "HELLO WORLD");
    assert!(running.wait().await.unwrap().is_success());
    assert!(running.write_stdin("late").await.is_err());
    scene.end().await;
}

pub async fn a_command_is_killed_and_another_gets_a_signal() {
    let scene = Scene::new().await;
    let mut sleeper = scene.sandbox.exec(bash("sleep 60 & wait")).await.unwrap();
    let polite = "trap 'echo bye; exit 9' INT; echo ready; while true; do sleep 0.02; done";
    let mut polite = scene.sandbox.exec(bash(polite)).await.unwrap();
    let mut stdout = taken(&mut polite);
    assert_eq!(until(&mut stdout, "\n").await, "ready\n");
    polite.signal("INT").await.unwrap();
    sleeper.kill().await.unwrap();
    assert_eq!(rest(&mut stdout).await, "bye\n");
    assert_eq!(polite.wait().await.unwrap().exit_code, Some(9));
    assert_eq!(sleeper.wait().await.unwrap().signal, Some(9));
    let sized = "trap 'stty size; exit' WINCH; echo ready; while true; do sleep 0.02; done";
    let mut terminal = scene.sandbox.exec(bash(sized).pty(80, 24)).await.unwrap();
    let mut stdout = taken(&mut terminal);
    assert_eq!(until(&mut stdout, "\n").await, "ready\r\n");
    terminal.resize(100, 50).await.unwrap();
    assert_eq!(rest(&mut stdout).await, "50 100\r\n");
    scene.end().await;
}

pub async fn check_raises_what_a_command_said() {
    let scene = Scene::new().await;
    let ended = scene.sandbox.run(bash("echo partly; echo oh no >&2; exit 4")).await.unwrap();
    assert_eq!(ended.stdout, b"partly\n");
    let failed = ended.check().unwrap_err();
    assert_eq!(failed.to_string(), "the command ended with exit code 4: oh no");
    assert!(matches!(failed, Error::Failed { .. }));
    assert!(scene.sandbox.run(bash("true")).await.unwrap().check().is_ok());
    scene.end().await;
}
