//! Requests over HTTP, without attaching: the list of sandboxes, and the deletion of one.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

use baton_protocol::{
    event::Token,
    id::{InstanceId, SandboxId},
};
use reqwest::{Method, StatusCode, redirect};
use serde::Deserialize;
use serde_json::Value;

use crate::{Connection, Error, Sandbox, client_clock, connect::Address};

/// The longest wait for one response; a server gives up a listing after half of it.
const RESPONSE_WITHIN: Duration = Duration::from_secs(60);

/// How long a server may wait until a killed sandbox is gone.
const GONE_WITHIN: Duration = Duration::from_secs(30);

/// One sandbox in the list of a server.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[non_exhaustive]
pub struct SandboxSummary {
    /// The sandbox's id.
    #[serde(rename = "sandbox_id")]
    pub id: SandboxId,
    /// `pending`, `running`, `checkpointed`, `failed`, or `unresponsive` if its instance stopped renewing its lease.
    /// `None` if the sandbox could not be read: see `error`.
    pub phase: Option<String>,
    /// Why it is in this phase; `baton explain` knows the words.
    #[serde(default)]
    pub reason: String,
    /// The same in a sentence.
    pub message: Option<String>,
    /// The instance that has it.
    pub instance: Option<InstanceId>,
    /// The labels that it was created with.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// When it was created, in RFC 3339.
    #[serde(default)]
    pub created: String,
    /// How many seconds ago that was.
    pub age_seconds: Option<u64>,
    /// Whether it outlives its instance.
    #[serde(default)]
    pub persistent: bool,
    /// The tenant that it belongs to.
    pub tenant: Option<String>,
    /// Why the server knows only its id.
    pub error: Option<String>,
}

/// The list of sandboxes, which is requested page by page.
#[derive(Debug)]
pub struct SandboxList {
    http: HttpClient,
    labels: BTreeMap<String, String>,
    page: VecDeque<SandboxSummary>,
    /// The end of the page before; `None` after the last page.
    after: Option<Option<String>>,
}

impl SandboxList {
    /// The next sandbox; `None` after the last one. A call that fails can be repeated.
    pub async fn next(&mut self) -> Result<Option<SandboxSummary>, Error> {
        loop {
            if let Some(found) = self.page.pop_front() {
                return Ok(Some(found));
            }
            let Some(after) = self.after.clone() else { return Ok(None) };
            self.request_page(after).await?;
        }
    }

    async fn request_page(&mut self, after: Option<String>) -> Result<(), Error> {
        #[derive(Deserialize)]
        struct Page {
            sandboxes: Vec<SandboxSummary>,
            next: Option<String>,
        }

        // A server filters by one label, up to its first `=`; the rest is done here.
        let label = self.labels.iter().find(|(name, _)| !name.contains('='));
        let mut query = Vec::new();
        query.extend(label.map(|(name, value)| ("label", format!("{name}={value}"))));
        query.extend(after.map(|after| ("after", after)));
        let response = self.http.request(Method::GET, "/sandboxes", &query, None).await?;
        if response.status != StatusCode::OK {
            return Err(response.into_error("the server lists sandboxes only for its admin key or an API key"));
        }
        let page: Page = serde_json::from_str(&response.body)
            .map_err(|error| Error::Protocol(format!("the list of sandboxes cannot be read: {error}")))?;
        let is_selected =
            |found: &SandboxSummary| self.labels.iter().all(|label| found.labels.get(label.0) == Some(label.1));
        self.page = page.sandboxes.into_iter().filter(is_selected).collect();
        self.after = page.next.map(Some);
        Ok(())
    }
}

impl Sandbox {
    /// Lists the sandboxes of a server that have all these labels: all sandboxes with its admin key as
    /// [`Connection::api_key`], those of a tenant with an API key of it.
    pub fn list(url: &str, labels: BTreeMap<String, String>, connection: Connection) -> Result<SandboxList, Error> {
        let http = HttpClient::new(url, connection)?;
        Ok(SandboxList { http, labels, page: VecDeque::new(), after: Some(None) })
    }

    /// Kills and deletes a sandbox without attaching to it, also while another client is attached. It needs the
    /// sandbox's token, or with [`Connection::api_key`] a key of its tenant or the admin key.
    ///
    /// Returns when the sandbox is gone, or after half a minute if only its deletion is recorded by then.
    pub async fn kill_by_id(
        url: &str,
        id: &SandboxId,
        token: Option<&Token>,
        connection: Connection,
    ) -> Result<(), Error> {
        let http = HttpClient::new(url, connection)?;
        let query = [("wait", GONE_WITHIN.as_secs().to_string())];
        let response = http.request(Method::DELETE, &format!("/sandboxes/{id}"), &query, token).await?;
        match response.status {
            StatusCode::NO_CONTENT | StatusCode::ACCEPTED => Ok(()),
            StatusCode::NOT_FOUND => Err(Error::NotFound),
            _ => Err(response.into_error("the token or the key does not match the sandbox")),
        }
    }
}

#[derive(Debug)]
struct HttpClient {
    address: Address,
    connection: Connection,
    client: reqwest::Client,
}

struct HttpResponse {
    status: StatusCode,
    body: String,
}

impl HttpClient {
    fn new(url: &str, connection: Connection) -> Result<Self, Error> {
        // The library ships no cryptography of its own.
        drop(rustls::crypto::ring::default_provider().install_default());
        let client = reqwest::Client::builder()
            // Keys are for this server only.
            .redirect(redirect::Policy::none())
            .connect_timeout(connection.connect_within)
            .timeout(connection.answer_within.min(RESPONSE_WITHIN))
            .build()
            .map_err(|error| Error::Connection(error.to_string()))?;
        Ok(Self { address: Address::parse(url)?, connection, client })
    }

    async fn request(
        &self,
        method: Method,
        path: &str,
        query: &[(&str, String)],
        token: Option<&Token>,
    ) -> Result<HttpResponse, Error> {
        let credentials = match &self.connection.auth {
            Some(auth) => client_clock::timeout(self.connection.connect_within, auth.headers_for(&self.address))
                .await
                .unwrap_or(Err(Error::Timeout(self.connection.connect_within)))?,
            None => Vec::new(),
        };
        let mut request = self.client.request(method, format!("{}{path}", self.address.http())).query(query);
        for (name, value) in self.connection.headers.iter().chain(&credentials) {
            request = request.header(name, value);
        }
        let secrets = [
            ("x-api-key", self.connection.api_key.as_deref()),
            ("x-sandbox-token", token.map(|token| token.0.as_str())),
        ];
        for (name, value) in secrets {
            request = value.into_iter().fold(request, |request, value| request.header(name, value));
        }
        let lost = |error: reqwest::Error| Error::Connection(error.without_url().to_string());
        let response = request.send().await.map_err(lost)?;
        Ok(HttpResponse { status: response.status(), body: response.text().await.map_err(lost)? })
    }
}

impl HttpResponse {
    /// `forbidden` is what 403 means where the server does not say it.
    fn into_error(self, forbidden: &str) -> Error {
        let json = serde_json::from_str::<Value>(&self.body).ok();
        let message = json.as_ref().and_then(|json| json.get("message")).and_then(Value::as_str);
        let said = message.unwrap_or(self.body.trim());
        let said = if said.is_empty() { None } else { Some(baton_files::plain(said)) };
        let code = self.status.as_u16();
        let or_code = |said: Option<String>| said.unwrap_or_else(|| format!("HTTP {code}"));
        match code {
            401 => Error::Permission(
                said.unwrap_or_else(|| "the server requires a key, and this one is wrong or missing (HTTP 401)".into()),
            ),
            403 => Error::Permission(said.unwrap_or_else(|| format!("{forbidden} (HTTP 403)"))),
            408 | 425 | 429 | 500..=599 => Error::Connection(or_code(said)),
            _ => Error::Protocol(or_code(said)),
        }
    }
}
