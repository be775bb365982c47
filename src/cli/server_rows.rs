//! Sandboxes as a server reports them, for people.

use serde_json::Value;

use super::rows::{Cells, Filter, HEADER, age};

fn text<'a>(view: &'a Value, field: &str) -> &'a str {
    view.get(field).and_then(Value::as_str).filter(|text| !text.is_empty()).unwrap_or("-")
}

fn labels(view: &Value) -> String {
    let labels = view.get("labels").and_then(Value::as_object).into_iter().flatten();
    let labels: Vec<String> =
        labels.map(|(name, value)| format!("{name}={}", value.as_str().unwrap_or_default())).collect();
    labels.join(",")
}

/// Whether the filter selects it. A server has no orphans to show.
pub fn is_selected(view: &Value, filter: &Filter) -> bool {
    let labels = view.get("labels");
    let has =
        |name: &str, value: &str| labels.and_then(|labels| labels.get(name)).and_then(Value::as_str) == Some(value);
    let is_phase = filter.phase.is_none_or(|phase| text(view, "phase").eq_ignore_ascii_case(phase.name()));
    !filter.orphans && is_phase && filter.labels.iter().all(|(name, value)| has(name, value))
}

/// One sandbox, with the columns of [`HEADER`]. All of it may be untrusted text.
pub fn line(view: &Value) -> String {
    let seconds = view.get("age_seconds").and_then(Value::as_u64);
    let summary = match view.get("unresponsive").filter(|silent| silent.is_object()) {
        Some(_) => text(view, "message"),
        None => view.get("error").and_then(Value::as_str).unwrap_or_default(),
    };
    let cells = Cells {
        id: text(view, "sandbox_id"),
        phase: text(view, "phase"),
        wanted: text(view, "desired_state"),
        age: seconds.map_or("-".to_owned(), |seconds| age(std::time::Duration::from_secs(seconds))),
        instance: text(view, "instance"),
        reason: text(view, "reason"),
        labels: labels(view),
        summary,
    };
    cells.line()
}

pub fn table(views: &[Value]) -> String {
    std::iter::once(HEADER.to_owned()).chain(views.iter().map(line)).map(|line| line + "\n").collect()
}

/// A line per field of one sandbox.
pub fn lines(view: &Value) -> String {
    let fields = view.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null());
    fields
        .map(|(name, value)| {
            let value = match value.as_array().filter(|_| name == "ports") {
                Some(ports) => ports.iter().map(port).collect::<Vec<_>>().join(", "),
                None => value.as_str().map_or_else(|| value.to_string(), str::to_owned),
            };
            format!("{name:24} {}\n", baton_files::plain(&value))
        })
        .collect()
}

/// A port and where it is reached.
fn port(listed: &Value) -> String {
    let number = listed.get("port").and_then(Value::as_u64).unwrap_or_default();
    let at = listed.get("url").and_then(Value::as_str);
    format!("{number} ({})", at.unwrap_or_else(|| text(listed, "path")))
}

#[cfg(test)]
mod tests {
    use baton_protocol::metadata::Phase;
    use serde_json::json;

    use super::{super::rows::ShownPhase, *};

    fn views() -> [Value; 4] {
        [
            json!({"sandbox_id": "sandbox-1", "phase": "running", "instance": "i", "age_seconds": 7300, "labels": {"a": "\u{1b}[2J"}}),
            json!({"sandbox_id": "sandbox-22", "error": "gone"}),
            json!({"sandbox_id": "sandbox-3", "phase": "unresponsive", "message": "since then", "unresponsive": {"seconds": 41}}),
            json!({"sandbox_id": "sandbox-4", "phase": "running", "message": "fine", "unresponsive": null, "reason": ""}),
        ]
    }

    #[test]
    fn ports_are_shown_with_their_address() {
        let view = json!({"sandbox_id": "sandbox-1", "ports": [
            {"port": 80, "path": "/sandboxes/sandbox-1/ports/80/", "url": null},
            {"port": 8000, "path": "/sandboxes/sandbox-1/ports/8000/", "url": "https://8000-sandbox-1.preview.example/"},
        ]});
        let ports = "80 (/sandboxes/sandbox-1/ports/80/), 8000 (https://8000-sandbox-1.preview.example/)";
        assert!(lines(&view).contains(&format!("{:24} {ports}\n", "ports")), "{}", lines(&view));
    }

    #[test]
    fn a_table_has_a_line_for_each_sandbox_and_no_tricks_in_it() {
        let table = table(&views());
        let rows: Vec<Vec<_>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(rows[0], ["SANDBOX", "PHASE", "WANTED", "AGE", "INSTANCE", "REASON", "LABELS"]);
        assert_eq!(rows[1], ["sandbox-1", "running", "-", "2h", "i", "-", "a=?[2J"]);
        assert_eq!(rows[2], ["sandbox-22", "-", "-", "-", "-", "-", "gone"]);
        assert_eq!(rows[3], ["sandbox-3", "unresponsive", "-", "-", "-", "-", "since", "then"]);
        assert_eq!(rows[4], ["sandbox-4", "running", "-", "-", "-", "-"]);
        assert_eq!(lines(&json!({"phase": "Running", "reason": null})), format!("{:24} Running\n", "phase"));
    }

    #[test]
    fn what_a_server_reports_is_filtered_like_what_is_stored() {
        let count = |filter: &Filter| views().iter().filter(|view| is_selected(view, filter)).count();
        assert_eq!(count(&Filter::default()), 4);
        let phase = Some(ShownPhase::Reported(Phase::Running));
        assert_eq!(count(&Filter { phase, ..Filter::default() }), 2);
        let labels = vec![("a".to_owned(), "b".to_owned())];
        assert_eq!(count(&Filter { labels, ..Filter::default() }), 0);
        assert_eq!(count(&Filter { orphans: true, ..Filter::default() }), 0);
    }
}
