//! The two ways in which `list`, `get`, `watch`, `checkpoint` and `handoff` work: they ask a server, or they work
//! directly on the storage.

use anyhow::Result;

use super::{
    context::CommandContext, global_options::ServerOptions, sandbox_client::SandboxClient, sandbox_name::SandboxName,
    server_client::ServerClient, storage_admin::StorageAdmin,
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
    /// A context names both; each verb chooses.
    Both(ServerClient, Box<StorageAdmin>),
}

impl Backend {
    /// `--url` chooses the server. Otherwise the storage that variables configure is used, then what a context names;
    /// without either, the server of `BATON_URL` or of the sandbox's saved token.
    pub fn choose(context: &CommandContext, options: &ServerOptions, sandbox: Option<&str>) -> Result<Self> {
        let server = context.server(options)?;
        if options.url.is_some() {
            return Ok(Self::Server(server));
        }
        if let Some(text) = sandbox {
            // A mistake on the command line is reported before one in the environment.
            SandboxName::parse(text)?;
        }
        let storage = || context.storage(&options.context).map(Box::new);
        let active = context.active_context(&options.context, None)?;
        let is_explicit = active.as_ref().is_some_and(|active| active.is_explicit);
        let has_variables = STORAGE_VARIABLES.iter().any(|variable| context.variable(variable.name).is_some());
        if has_variables && !is_explicit {
            return Ok(Self::Storage(storage()?));
        }
        let named = active.map_or((false, false), |active| (active.saved.url.is_some(), active.saved.has_storage()));
        match named {
            (true, true) => return Ok(Self::Both(server, storage()?)),
            (true, false) => return Ok(Self::Server(server)),
            (false, true) => return Ok(Self::Storage(storage()?)),
            (false, false) => {}
        }
        let is_saved = || sandbox.is_some_and(|text| matches!(server.saved_token(text), Ok(Some(_))));
        if server.url.is_some() || is_saved() {
            return Ok(Self::Server(server));
        }
        Ok(Self::Storage(storage()?))
    }

    /// The server, if a context names both and the sandbox's token is known: it can attach.
    pub fn preferring_server(self, client: &SandboxClient, sandbox: &str) -> Result<ServerOrStorage> {
        Ok(match self {
            Self::Both(..) if client.has_token(sandbox)? => ServerOrStorage::Server,
            Self::Server(_) | Self::Storage(_) | Self::Both(..) => self.preferring_storage(),
        })
    }

    pub fn preferring_storage(self) -> ServerOrStorage {
        match self {
            Self::Server(_) => ServerOrStorage::Server,
            Self::Storage(storage) | Self::Both(_, storage) => ServerOrStorage::Storage(storage),
        }
    }
}

/// What a verb for one sandbox uses.
#[derive(Clone, Debug)]
pub enum ServerOrStorage {
    Server,
    Storage(Box<StorageAdmin>),
}
