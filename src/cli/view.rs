//! `baton list` and `baton get`: what a server knows of sandboxes, for holders of its admin key.

use std::{process::ExitCode, sync::Arc, time::Duration};

use anyhow::{Context, anyhow, bail};
use baton_client::Auth;
use serde_json::Value;

use super::{
    config::Output,
    get, list,
    rows::Filter,
    screen,
    server_args::{DEFAULT_URL, ServerArgs, explain},
    server_requests::no_id,
    stdio_bridge::Signals,
    storage_admin,
};
use crate::clock::{SharedClock, SystemClock};

const WITHIN: Duration = Duration::from_secs(60);

/// List the sandboxes in the store.
///
/// With storage variables set it reads the storage, without a server; with --url, or without storage,
/// it asks the server, whose admin key must be given.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = format!("Examples:\n  baton list --phase running\n  baton list --label team=red -o json\n  \
                  BATON_API_KEY=… baton list --url wss://…\n  baton list --orphans\n\n{}", storage_admin::CODES))]
pub struct ListArgs {
    #[command(flatten)]
    pub filter: Filter,
    /// How to print.
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    pub output: Output,
    #[command(flatten)]
    pub server: ServerArgs,
}

/// Show one sandbox: what is wanted, what is so, who holds it and what it starts from.
///
/// With storage variables set it reads the storage, without a server; with --url, or without storage,
/// it asks the server, whose admin key must be given.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = format!("Examples:\n  baton get 0b9f\n  baton get 0b9f -o json\n\n{}", storage_admin::CODES))]
pub struct GetArgs {
    /// How to print.
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    pub output: Output,
    #[command(flatten)]
    pub server: ServerArgs,
    /// Its id, or the beginning of it if its token is kept here.
    pub sandbox: String,
}

pub async fn ask_list(args: ListArgs) -> anyhow::Result<ExitCode> {
    let Filter { labels, phase, orphans } = &args.filter;
    if labels.len() > 1 || phase.is_some() || *orphans {
        bail!("a server finds sandboxes by one label; more needs the storage");
    }
    let label = labels.first().map(|(name, value)| format!("{name}={value}"));
    let site = Site::of(&args.server, args.server.url())?;
    interruptible(async {
        let (mut found, mut after) = (Vec::new(), None::<String>);
        loop {
            let mut query = Vec::new();
            query.extend(label.as_deref().map(|label| ("label", label)));
            query.extend(after.as_deref().map(|after| ("after", after)));
            let Some(mut page) = site.get("sandboxes", &query).await? else { bail!("{} lists nothing", site.base) };
            if let Some(Value::Array(sandboxes)) = page.get_mut("sandboxes").map(Value::take) {
                found.extend(sandboxes);
            }
            match page.get("next").and_then(Value::as_str) {
                Some(next) => after = Some(next.to_owned()),
                None => break,
            }
        }
        screen::print(&match args.output {
            Output::Table => table(&found),
            Output::Json => screen::json(&Value::Array(found)),
        })
    })
    .await
}

pub async fn ask_get(args: GetArgs) -> anyhow::Result<ExitCode> {
    let kept = args.server.tokens().ok().and_then(|tokens| tokens.find(&args.sandbox).transpose()).transpose()?;
    let url = args.server.url.clone().or_else(|| Some(kept.as_ref()?.url.clone()));
    let Some(id) = args.server.id_of(&args.sandbox)? else { return Ok(no_id(&args.sandbox)) };
    let site = Site::of(&args.server, url.as_deref().unwrap_or(DEFAULT_URL))?;
    interruptible(async {
        let Some(view) = site.get(&format!("sandboxes/{id}"), &[]).await? else { bail!("there is no such sandbox") };
        screen::print(&match args.output {
            Output::Table => lines(&view),
            Output::Json => screen::json(&view),
        })
    })
    .await
}

impl ListArgs {
    /// Reads the storage, without a server.
    pub fn by_storage(&self) -> anyhow::Result<ExitCode> {
        list::run(list::Args { output: self.output, filter: self.filter.clone() })
    }
}

impl GetArgs {
    /// Reads the storage, without a server.
    pub fn by_storage(&self) -> anyhow::Result<ExitCode> {
        match self.server.id_of(&self.sandbox)? {
            Some(id) => get::run(get::Args { id, output: self.output }),
            None => Ok(no_id(&self.sandbox)),
        }
    }
}

async fn interruptible(work: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<ExitCode> {
    let mut signals = Signals::listen()?;
    let clock: SharedClock = Arc::new(SystemClock);
    tokio::select! {
        done = clock.timeout(WITHIN, work) => done.map_err(|_| anyhow!("no answer within a minute"))?.map(|()| ExitCode::SUCCESS),
        code = signals.end() => Ok(ExitCode::from(code)),
    }
}

/// The plain HTTP endpoints of a server.
struct Site {
    base: String,
    client: reqwest::Client,
    key: Option<String>,
    headers: Vec<(String, String)>,
    auth: Option<Auth>,
}

impl Site {
    fn of(server: &ServerArgs, url: &str) -> anyhow::Result<Self> {
        rustls::crypto::ring::default_provider().install_default().ok();
        let base = match url.split_once("://") {
            Some(("ws", rest)) => format!("http://{rest}"),
            Some(("wss", rest)) => format!("https://{rest}"),
            _ => url.to_owned(),
        };
        Ok(Self {
            base: base.trim_end_matches('/').to_owned(),
            client: reqwest::Client::builder().build()?,
            key: server.api_key.clone(),
            headers: server.header.clone(),
            auth: server.auth(),
        })
    }

    /// Returns `None` if there is no such resource.
    async fn get(&self, path: &str, query: &[(&str, &str)]) -> anyhow::Result<Option<Value>> {
        let mut request = self.client.get(format!("{}/{path}", self.base)).query(query);
        let given = match &self.auth {
            Some(auth) => auth.headers(&self.base).await.map_err(|error| explain(error, &self.base))?,
            None => Vec::new(),
        };
        for (name, value) in self.headers.iter().chain(&given) {
            request = request.header(name, value);
        }
        if let Some(key) = &self.key {
            request = request.header("x-api-key", key);
        }
        let answer = request.send().await.map_err(|error| {
            anyhow!(
                "no server answers at {} ({}): name another with --url or BATON_URL",
                self.base,
                error.without_url()
            )
        })?;
        let status = answer.status();
        let text = answer.text().await.context("the answer broke off")?;
        let json = serde_json::from_str::<Value>(&text).ok();
        let message = json.as_ref().and_then(|json| json.get("message")).and_then(Value::as_str).unwrap_or_default();
        match status.as_u16() {
            200 => Ok(Some(json.with_context(|| format!("{} is no baton server", self.base))?)),
            404 => Ok(None),
            401 => bail!("the server wants its admin key: give it with BATON_API_KEY or --api-key"),
            403 => bail!("the server has no admin key set (BATON_ADMIN_KEY), so nobody may list"),
            code => bail!("the server answers {code}: {}", baton_files::plain(message)),
        }
    }
}

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
fn story(view: &Value) -> String {
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

/// Columns are as wide as their content; labels are untrusted text.
fn table(views: &[Value]) -> String {
    let head = ["SANDBOX", "PHASE", "INSTANCE", "AGE", "LABELS"].map(str::to_owned);
    let row = |view: &Value| {
        [
            text(view, "sandbox_id").to_owned(),
            text(view, "phase").to_owned(),
            text(view, "instance").to_owned(),
            age(view),
            labels(view) + &story(view),
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

fn lines(view: &Value) -> String {
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
