//! Sandboxes as a server reports them, for people.

use serde_json::Value;

fn text<'a>(view: &'a Value, field: &str) -> &'a str {
    view.get(field).and_then(Value::as_str).unwrap_or("-")
}

fn labels(view: &Value) -> String {
    let labels = view.get("labels").and_then(Value::as_object).into_iter().flatten();
    let labels: Vec<String> =
        labels.map(|(name, value)| format!("{name}={}", value.as_str().unwrap_or_default())).collect();
    if labels.is_empty() { "-".to_owned() } else { labels.join(",") }
}

/// The message after the row of a sandbox whose holder is unresponsive.
fn unresponsive_message(view: &Value) -> String {
    let silent = view.get("unresponsive").filter(|silent| silent.is_object());
    silent.map_or(String::new(), |_| format!("  {}", text(view, "message")))
}

fn age(view: &Value) -> String {
    match view.get("age_seconds").and_then(Value::as_u64) {
        None => "-".to_owned(),
        Some(seconds) if seconds < 120 => format!("{seconds}s"),
        Some(seconds) if seconds < 7200 => format!("{}m", seconds / 60),
        Some(seconds) if seconds < 172_800 => format!("{}h", seconds / 3600),
        Some(seconds) => format!("{}d", seconds / 86_400),
    }
}

/// A line per sandbox. Columns are as wide as their content; labels are untrusted text.
pub fn table(views: &[Value]) -> String {
    let head = ["SANDBOX", "PHASE", "INSTANCE", "AGE", "LABELS"].map(str::to_owned);
    let row = |view: &Value| {
        [
            text(view, "sandbox_id").to_owned(),
            text(view, "phase").to_owned(),
            text(view, "instance").to_owned(),
            age(view),
            labels(view) + &unresponsive_message(view),
        ]
        .map(|cell| baton_files::plain(&cell))
    };
    let rows: Vec<[String; 5]> = std::iter::once(head).chain(views.iter().map(row)).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths = [width(0), width(1), width(2), width(3)];
    let line = |row: &[String; 5]| {
        let cells: String = widths.iter().zip(row).map(|(width, cell)| format!("{cell:width$}  ")).collect();
        format!("{cells}{}\n", row[4])
    };
    rows.iter().map(line).collect()
}

/// A line per field of one sandbox.
pub fn lines(view: &Value) -> String {
    let fields = view.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null());
    fields
        .map(|(name, value)| {
            let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            format!("{name:24} {}\n", baton_files::plain(&value))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_table_has_a_line_for_each_sandbox_and_no_tricks_in_it() {
        let views = [
            json!({"sandbox_id": "sandbox-1", "phase": "Running", "instance": "i", "age_seconds": 7300, "labels": {"a": "\u{1b}[2J"}}),
            json!({"sandbox_id": "sandbox-22", "error": "gone"}),
            json!({"sandbox_id": "sandbox-3", "phase": "unresponsive", "message": "since then", "unresponsive": {"seconds": 41}}),
            json!({"sandbox_id": "sandbox-4", "phase": "running", "message": "fine", "unresponsive": null}),
        ];
        let expected = "SANDBOX     PHASE         INSTANCE  AGE  LABELS\n\
                        sandbox-1   Running       i         2h   a=?[2J\n\
                        sandbox-22  -             -         -    -\n\
                        sandbox-3   unresponsive  -         -    -  since then\n\
                        sandbox-4   running       -         -    -\n";
        assert_eq!(table(&views), expected);
        assert_eq!(lines(&json!({"phase": "Running", "reason": null})), format!("{:24} Running\n", "phase"));
    }
}
