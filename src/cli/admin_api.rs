//! The HTTP endpoints of a server that list sandboxes, for holders of its admin key.

use std::{process::ExitCode, time::Duration};

use anyhow::{Context, Result, anyhow, bail};
use baton_client::{Auth, SandboxId};
use serde_json::{Map, Value};

use super::{
    rows::Filter,
    sandbox_name::SandboxName,
    server_client::{ServerClient, describe_error},
    server_rows,
    stdio_bridge::Signals,
};
use crate::{clock::SharedClock, config::variables::ADMIN_KEY};

/// How long all requests of a verb may take together.
const VERB_TIMEOUT: Duration = Duration::from_secs(60);

/// What the network of a running sandbox adds to its view.
const NETWORK_FIELDS: [&str; 2] = ["ports", "egress_denied"];

#[derive(Debug)]
pub struct AdminApi {
    base: String,
    client: reqwest::Client,
    key: Option<String>,
    headers: Vec<(String, String)>,
    auth: Option<Auth>,
}

impl AdminApi {
    /// `url` may be that of the WebSocket.
    pub fn new(server: &ServerClient, url: &str) -> Result<Self> {
        let base = match url.split_once("://") {
            Some(("ws", rest)) => format!("http://{rest}"),
            Some(("wss", rest)) => format!("https://{rest}"),
            _ => url.to_owned(),
        };
        Ok(Self {
            base: base.trim_end_matches('/').to_owned(),
            client: reqwest::Client::builder().build()?,
            key: server.admin_key(url),
            headers: server.headers.clone(),
            auth: server.auth(),
        })
    }

    /// Every sandbox, page by page; with a label, only those that have it.
    pub async fn list(&self, label: Option<&str>) -> Result<Vec<Value>> {
        let (mut found, mut after) = (Vec::new(), None::<String>);
        loop {
            let mut query = Vec::new();
            query.extend(label.map(|label| ("label", label)));
            query.extend(after.as_deref().map(|after| ("after", after)));
            let Some(mut page) = self.request("sandboxes", &query).await? else {
                bail!("{} does not list sandboxes", self.base)
            };
            if let Some(Value::Array(sandboxes)) = page.get_mut("sandboxes").map(Value::take) {
                found.extend(sandboxes);
            }
            match page.get("next").and_then(Value::as_str) {
                Some(next) => after = Some(next.to_owned()),
                None => return Ok(found),
            }
        }
    }

    /// The sandboxes that the filter selects.
    pub async fn selected(&self, filter: &Filter) -> Result<Vec<Value>> {
        // A server filters by one label; the rest is done here.
        let label = filter.labels.first().map(|(name, value)| format!("{name}={value}"));
        let mut found = self.list(label.as_deref()).await?;
        found.retain(|view| server_rows::is_selected(view, filter));
        Ok(found)
    }

    /// Returns `None` if there is no such sandbox.
    pub async fn get(&self, id: &SandboxId) -> Result<Option<Value>> {
        self.request(&format!("sandboxes/{id}"), &[]).await
    }

    /// The fields of a view that only the instance knows on which the sandbox runs; empty on any other one.
    pub async fn network(&self, id: &SandboxId) -> Result<Map<String, Value>> {
        let listed = self.request(&format!("sandboxes/{id}/ports"), &[]).await?;
        let fields = listed.as_ref().and_then(Value::as_object).cloned().unwrap_or_default();
        Ok(fields
            .into_iter()
            .filter(|(name, value)| NETWORK_FIELDS.contains(&name.as_str()) && !value.is_null())
            .collect())
    }

    /// The ids of all sandboxes.
    pub async fn ids(&self) -> Result<Vec<SandboxId>> {
        let views = self.list(None).await?;
        let ids = views.iter().filter_map(|view| SandboxId::parse(view.get("sandbox_id")?.as_str()?).ok());
        Ok(ids.collect())
    }

    /// The sandbox that `text` names, whole or by the beginning of its id.
    pub async fn sandbox_id(&self, text: &str) -> Result<SandboxId> {
        let name = SandboxName::parse(text)?;
        if let Some(id) = name.whole() {
            return Ok(id);
        }
        name.choose(self.ids().await?)?.with_context(|| format!("the server has no sandbox `{text}`"))
    }

    /// Returns `None` if there is no such resource.
    async fn request(&self, path: &str, query: &[(&str, &str)]) -> Result<Option<Value>> {
        let mut request = self.client.get(format!("{}/{path}", self.base)).query(query);
        let credentials = match &self.auth {
            Some(auth) => auth.headers(&self.base).await.map_err(|error| describe_error(error, &self.base))?,
            None => Vec::new(),
        };
        for (name, value) in self.headers.iter().chain(&credentials) {
            request = request.header(name, value);
        }
        if let Some(key) = &self.key {
            request = request.header("x-api-key", key);
        }
        let response = request.send().await.map_err(|error| {
            anyhow!(
                "no server answers at {} ({}): name another with --url, BATON_URL or --context",
                self.base,
                error.without_url()
            )
        })?;
        let status = response.status();
        let text = response.text().await.context("the response is incomplete")?;
        let json = serde_json::from_str::<Value>(&text).ok();
        let message = json.as_ref().and_then(|json| json.get("message")).and_then(Value::as_str).unwrap_or_default();
        match status.as_u16() {
            200 => Ok(Some(json.with_context(|| format!("{} is not a baton server", self.base))?)),
            404 => Ok(None),
            401 => bail!(
                "the server requires its admin key: pass it with BATON_API_KEY or --api-key, or save it in a context"
            ),
            403 => bail!("the server has no admin key ({ADMIN_KEY}), so it does not list sandboxes"),
            code => bail!("the server answers {code}: {}", baton_files::plain(message)),
        }
    }
}

/// Ends with the work, a signal or the timeout.
pub async fn until_signal(clock: &SharedClock, work: impl Future<Output = Result<()>>) -> Result<ExitCode> {
    let mut signals = Signals::listen()?;
    tokio::select! {
        done = clock.timeout(VERB_TIMEOUT, work) => {
            done.map_err(|_| anyhow!("the server did not answer within a minute"))?.map(|()| ExitCode::SUCCESS)
        }
        code = signals.end() => Ok(ExitCode::from(code)),
    }
}
