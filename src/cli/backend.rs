//! The two ways in which `list`, `get`, `checkpoint` and `handoff` work: they ask a server, or they work directly on
//! the storage.

use anyhow::Result;

use super::{
    context::CommandContext, global_options::ServerOptions, server_client::ServerClient, storage_admin::StorageAdmin,
};
use crate::config::{
    Variable,
    variables::{
        CHECKPOINT_AND_RESTORE_PATH, SANDBOX_CHECKPOINT_BUCKET, SANDBOX_CHECKPOINT_MOUNT_PATH, SANDBOX_METADATA_BUCKET,
        SANDBOX_METADATA_MOUNT_PATH,
    },
};

/// If one of these is set, the storage is configured.
const STORAGE_VARIABLES: [Variable; 5] = [
    SANDBOX_METADATA_BUCKET,
    SANDBOX_METADATA_MOUNT_PATH,
    SANDBOX_CHECKPOINT_BUCKET,
    SANDBOX_CHECKPOINT_MOUNT_PATH,
    CHECKPOINT_AND_RESTORE_PATH,
];

#[derive(Clone, Debug)]
pub enum Backend {
    Server(ServerClient),
    Storage(Box<StorageAdmin>),
}

impl Backend {
    /// `--url` chooses the server. Otherwise a configured storage is used; without one, the server of `BATON_URL` or
    /// of the sandbox's saved token.
    pub fn choose(context: &CommandContext, options: &ServerOptions, sandbox: Option<&str>) -> Result<Self> {
        let server = context.server(options)?;
        if options.url.is_some() {
            return Ok(Self::Server(server));
        }
        let has_storage = STORAGE_VARIABLES.iter().any(|variable| context.variable(variable.name).is_some());
        let is_saved = || sandbox.is_some_and(|text| matches!(server.saved_token(text), Ok(Some(_))));
        if !has_storage && (server.url.is_some() || is_saved()) {
            return Ok(Self::Server(server));
        }
        if let Some(text) = sandbox {
            // A mistake on the command line is reported before one in the environment.
            server.sandbox_id(text)?;
        }
        Ok(Self::Storage(Box::new(context.storage()?)))
    }
}
