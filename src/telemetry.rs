//! Logging: lines for people on a terminal, JSON in the format of Cloud Logging on Cloud Run;
//! and [`Redacted`], for values that must not be logged.

use std::{
    borrow::Cow,
    fmt,
    io::{self, IsTerminal},
};

use baton_protocol::printable::escape_json;
use serde_json::{Map, Value, json};
use tracing::{
    Event, Level, Subscriber,
    field::{Field, Visit},
};
use tracing_subscriber::{
    EnvFilter,
    fmt::{
        FmtContext, FormatEvent, FormattedFields, MakeWriter,
        format::{JsonFields, Writer},
    },
    registry::LookupSpan,
};

use crate::config::variables::LOG;

/// A secret. It can be used, but not printed, logged or serialized by accident.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Redacted<T>(T);

impl<T> Redacted<T> {
    pub fn new(secret: T) -> Self {
        Self(secret)
    }

    /// The only access to the secret; search for this name to find every use.
    pub fn reveal(&self) -> &T {
        &self.0
    }
}

impl<T> fmt::Debug for Redacted<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(redacted)")
    }
}

impl<T> fmt::Display for Redacted<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(redacted)")
    }
}

/// The format of log lines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Style {
    /// For people.
    Plain,
    /// One JSON object per line, for Cloud Logging. With the project's name, a line is shown with its trace.
    CloudLogging { project: Option<String> },
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{} is '{filter}', which is not a filter such as info or baton::api=debug,warn ({why})", LOG)]
    Filter { filter: String, why: String },
    #[error("logging was already started in this process")]
    Started,
}

/// Starts logging to standard error, once per process.
pub fn init(filter: &str, style: Style) -> Result<(), Error> {
    let colours = io::stderr().is_terminal();
    let subscriber = subscriber(filter, style, colours, io::stderr)?;
    tracing::subscriber::set_global_default(subscriber).map_err(|_| Error::Started)
}

/// The subscriber of [`init`] with any writer; tests read its output.
pub fn subscriber<W>(
    filter: &str,
    style: Style,
    colours: bool,
    writer: W,
) -> Result<Box<dyn Subscriber + Send + Sync>, Error>
where
    W: for<'w> MakeWriter<'w> + Send + Sync + 'static,
{
    let parsed = EnvFilter::try_new(filter)
        .map_err(|error| Error::Filter { filter: filter.to_owned(), why: error.to_string() })?;
    let base = tracing_subscriber::fmt().with_env_filter(parsed).with_writer(Printable(writer));
    Ok(match style {
        Style::Plain => Box::new(base.with_ansi(colours).with_target(false).finish()),
        Style::CloudLogging { project } => {
            let format = CloudLogging { project };
            Box::new(base.with_ansi(false).fmt_fields(JsonFields::new()).event_format(format).finish())
        }
    })
}

/// The error that ends the process, as a line for Cloud Logging; usable before logging starts and after it ends.
pub fn last_words(text: &str) -> String {
    escape_json(&json!({"severity": "ERROR", "message": text}).to_string()).into_owned()
}

/// Escapes characters in fields that control a terminal. Colours stay: they come from the formatter.
#[derive(Debug)]
struct Printable<W>(W);

impl<'w, W: MakeWriter<'w>> MakeWriter<'w> for Printable<W> {
    type Writer = Printable<W::Writer>;

    fn make_writer(&'w self) -> Self::Writer {
        Printable(self.0.make_writer())
    }

    fn make_writer_for(&'w self, metadata: &tracing::Metadata<'_>) -> Self::Writer {
        Printable(self.0.make_writer_for(metadata))
    }
}

/// Escapes every control character below DEL except line ends, tabs and colour sequences.
fn without_control(line: &str) -> Cow<'_, str> {
    let is_colour = |rest: &str| {
        let code =
            rest.strip_prefix("\u{1b}[").map(|code| code.trim_start_matches(|c: char| c.is_ascii_digit() || c == ';'));
        code.is_some_and(|code| code.starts_with('m'))
    };
    let obeyed = |at: usize, letter: char| {
        letter < ' ' && !matches!(letter, '\n' | '\t') && !(letter == '\u{1b}' && is_colour(&line[at..]))
    };
    if !line.char_indices().any(|(at, letter)| obeyed(at, letter)) {
        return Cow::Borrowed(line);
    }
    let escaped = line.char_indices().map(|(at, letter)| match obeyed(at, letter) {
        true => format!("\\u{:04x}", letter as u32),
        false => letter.to_string(),
    });
    Cow::Owned(escaped.collect())
}

impl<W: io::Write> io::Write for Printable<W> {
    /// Expects a whole line per call, as the formatter writes it.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let line_text = String::from_utf8_lossy(line);
        self.0.write_all(escape_json(&without_control(&line_text)).as_bytes())?;
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// `severity` and `message` are the names that Cloud Logging expects; it adds the time itself.
#[derive(Debug)]
struct CloudLogging {
    project: Option<String>,
}

impl<S> FormatEvent<S, JsonFields> for CloudLogging
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, JsonFields>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut line = Map::new();
        line.insert("severity".to_owned(), json!(severity(*event.metadata().level())));
        line.insert("target".to_owned(), json!(event.metadata().target()));
        // Outer spans first, so that the innermost one wins, and the event wins over all spans.
        for span in context.event_scope().into_iter().flat_map(|scope| scope.from_root()) {
            if let Some(fields) = span.extensions().get::<FormattedFields<JsonFields>>()
                && let Ok(Value::Object(fields)) = serde_json::from_str(&fields.fields)
            {
                line.extend(fields);
            }
        }
        event.record(&mut Fields(&mut line));
        if let (Some(project), Some(trace)) = (&self.project, line.get("trace").and_then(Value::as_str)) {
            let trace = json!(format!("projects/{project}/traces/{trace}"));
            line.insert("logging.googleapis.com/trace".to_owned(), trace);
        }
        writeln!(writer, "{}", Value::Object(line))
    }
}

fn severity(level: Level) -> &'static str {
    match level {
        Level::ERROR => "ERROR",
        Level::WARN => "WARNING",
        Level::INFO => "INFO",
        _ => "DEBUG",
    }
}

struct Fields<'a>(&'a mut Map<String, Value>);

impl Fields<'_> {
    fn put(&mut self, field: &Field, value: Value) {
        self.0.insert(field.name().to_owned(), value);
    }
}

impl Visit for Fields<'_> {
    fn record_f64(&mut self, field: &Field, value: f64) {
        self.put(field, json!(value));
    }
    fn record_i64(&mut self, field: &Field, value: i64) {
        self.put(field, json!(value));
    }
    fn record_u64(&mut self, field: &Field, value: u64) {
        self.put(field, json!(value));
    }
    fn record_bool(&mut self, field: &Field, value: bool) {
        self.put(field, json!(value));
    }
    fn record_str(&mut self, field: &Field, value: &str) {
        self.put(field, json!(value));
    }
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.put(field, json!(format!("{value:?}")));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use baton_protocol::printable::is_printable;

    use super::*;

    #[derive(Clone, Default)]
    struct Page(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Page {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl Page {
        fn of(filter: &str, style: Style, work: impl FnOnce()) -> String {
            let page = Page::default();
            let pen = page.clone();
            let subscriber = subscriber(filter, style, false, move || pen.clone()).unwrap();
            tracing::subscriber::with_default(subscriber, work);
            String::from_utf8(page.0.lock().unwrap().clone()).unwrap()
        }
    }

    #[test]
    fn a_secret_is_never_printed() {
        let key = Redacted::new("hunter2");
        let page = Page::of("info", Style::Plain, || tracing::info!(%key, ?key, "who goes there"));
        assert!(page.contains("who goes there") && !page.contains("hunter2"), "{page}");
        assert_eq!(*key.reveal(), "hunter2");
    }

    #[test]
    fn a_line_for_cloud_logging_has_severity_message_and_the_fields_of_its_spans() {
        let page = Page::of("info", Style::CloudLogging { project: None }, || {
            let span = tracing::info_span!("pass", sandbox = "sandbox-1", epoch = 7);
            let _inside = span.enter();
            tracing::warn!(action = "create", took = 1.5, again = true, "slow\nstore");
        });
        let line: Value = serde_json::from_str(&page).unwrap();
        assert_eq!(page.lines().count(), 1);
        assert_eq!(
            (&line["severity"], &line["message"], &line["sandbox"]),
            (&json!("WARNING"), &json!("slow\nstore"), &json!("sandbox-1"))
        );
        assert_eq!(
            (&line["epoch"], &line["action"], &line["took"], &line["again"]),
            (&json!(7), &json!("create"), &json!(1.5), &json!(true))
        );
    }

    #[test]
    fn a_line_with_a_trace_names_it_as_cloud_logging_wants_it_where_the_project_is_known() {
        for (project, expected) in [(Some("p"), json!("projects/p/traces/0af7")), (None, Value::Null)] {
            let style = Style::CloudLogging { project: project.map(str::to_owned) };
            let page = Page::of("info", style, || {
                let span = tracing::info_span!("session", trace = "0af7");
                span.in_scope(|| tracing::info!("here"));
                tracing::info!("there");
            });
            let lines: Vec<Value> = page.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
            assert_eq!((&lines[0]["trace"], &lines[0]["logging.googleapis.com/trace"]), (&json!("0af7"), &expected));
            assert_eq!(lines[1].get("logging.googleapis.com/trace"), None);
        }
    }

    #[test]
    fn no_field_and_no_message_brings_a_terminal_to_do_anything() {
        let words = "\u{1b}[2J\u{7}\u{9b}2J\u{202e}\u{2066}\u{200f}\u{61c}\u{2028}";
        for style in [Style::Plain, Style::CloudLogging { project: None }] {
            let page = Page::of("info", style, || {
                let span = tracing::info_span!("pass", shown = %words, debugged = ?words);
                let _inside = span.enter();
                tracing::warn!(shown = %words, debugged = ?words, "said: {words}");
            });
            assert!(page.contains("said"), "{page:?}");
            assert_eq!(page.trim_end().chars().find(|letter| !is_printable(*letter)), None, "{page:?}");
        }
        let line = last_words(words);
        assert_eq!(serde_json::from_str::<Value>(&line).unwrap()["message"], words);
        assert!(line.chars().all(is_printable), "{line:?}");
    }

    #[test]
    fn the_filter_decides_what_is_written() {
        let page = Page::of("warn", Style::Plain, || {
            tracing::info!("quiet");
            tracing::error!("loud");
        });
        assert!(page.contains("loud") && !page.contains("quiet"), "{page}");
    }

    #[test]
    fn a_bad_filter_is_named_with_its_variable() {
        let error = subscriber("baton=loud", Style::Plain, false, io::sink).err().unwrap().to_string();
        assert!(error.starts_with("BATON_LOG is 'baton=loud'"), "{error}");
    }
}
