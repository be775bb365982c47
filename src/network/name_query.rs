//! Answers one name query of a sandbox.

use std::sync::Arc;

use baton_protocol::{
    agent::NameResolution,
    frame::{Frame, FrameKind},
    id::SandboxId,
};

use super::{
    NetworkContext,
    egress_rules::{Denial, Destination, EgressPolicy},
    name_resolver::Lookup,
    traffic::SandboxTraffic,
};

#[derive(Debug)]
pub struct NameQuery {
    pub id: SandboxId,
    pub number: u32,
    pub context: Arc<NetworkContext>,
    pub policy: EgressPolicy,
    pub traffic: Arc<SandboxTraffic>,
}

impl NameQuery {
    /// Looks the name up if it may be reached. A name that is no host name does not exist.
    pub async fn answer(&self, name: Option<String>) -> Frame {
        let resolved = match name {
            Some(name) => self.resolve(name).await,
            None => NameResolution::Missing {},
        };
        let payload = serde_json::to_vec(&resolved).unwrap_or_default();
        Frame::new(FrameKind::Resolved).exec(self.number).payload(payload)
    }

    async fn resolve(&self, name: String) -> NameResolution {
        let destination = Destination::Name(name.clone());
        // Only allowed names are looked up: a query would carry the name out of the sandbox.
        if let Err(why) = self.policy.judge(&destination, None) {
            return self.deny(&name, why);
        }
        let lookup = self.context.resolver.lookup(&name);
        match self.context.clock.timeout(self.context.settings.limits.connect, lookup).await {
            Ok(Ok(Lookup::Missing)) => NameResolution::Missing {},
            Ok(Ok(Lookup::Addresses(addresses))) => {
                let mut judged = addresses.into_iter().map(|address| self.policy.judge_dialled(address, None));
                match judged.clone().any(|judged| judged.is_ok()) {
                    true => NameResolution::Found {},
                    false => {
                        judged.find_map(Result::err).map_or(NameResolution::Missing {}, |why| self.deny(&name, why))
                    }
                }
            }
            Ok(Err(error)) => {
                tracing::debug!(sandbox = %self.id, name, %error, "a name could not be looked up");
                NameResolution::Failed {}
            }
            Err(elapsed) => {
                tracing::debug!(sandbox = %self.id, name, error = %elapsed, "a name could not be looked up");
                NameResolution::Failed {}
            }
        }
    }

    fn deny(&self, name: &str, why: Denial) -> NameResolution {
        self.context.report_denial(&self.id, name, None, why, &self.traffic);
        NameResolution::Denied {}
    }
}
