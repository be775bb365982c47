//! The table: every case over every implementation, one test each.

use std::{sync::Arc, time::Duration};

use baton::{
    clock::{SharedClock, SystemClock},
    storage::{
        directory::Directory,
        gcs::{Gcs, GcsConnection},
        gcsfuse::Mounted,
        memory::Memory,
        store::Store,
    },
};
use baton_fake_gcs::{FakeGcs, FakeGcsOptions};

use crate::{gcsfuse_mount::Gcsfuse, store_cases};

/// A store to try, and what has to live as long as it does.
pub struct Subject {
    pub store: Arc<dyn Store>,
    /// Opens the same store once more, as another instance would.
    pub open: Box<dyn Fn() -> Arc<dyn Store> + Send + Sync>,
    /// Entries in a page of its listings.
    pub page: usize,
    /// Every key of a test begins with this.
    pub prefix: String,
    _keep: Box<dyn std::any::Any + Send + Sync>,
}

impl Subject {
    fn new(open: impl Fn() -> Arc<dyn Store> + Send + Sync + 'static, keep: impl std::any::Any + Send + Sync) -> Self {
        Self { store: open(), open: Box::new(open), page: PAGE, prefix: String::new(), _keep: Box::new(keep) }
    }
}

const PAGE: usize = 7;

pub fn clock() -> SharedClock {
    Arc::new(SystemClock)
}

async fn memory() -> Subject {
    let store: Arc<dyn Store> = Arc::new(Memory::new(clock()).with_page(PAGE));
    Subject::new(move || store.clone(), ())
}

async fn directory() -> Subject {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().to_owned();
    Subject::new(move || Arc::new(Directory::new(&path, clock()).with_page(PAGE)), root)
}

async fn mounted() -> Subject {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().to_owned();
    Subject::new(move || Arc::new(Mounted::new(&path, clock()).with_page(PAGE)), root)
}

/// What Cloud Run mounts: a real gcsfuse over a bucket.
async fn gcsfuse() -> Subject {
    let (fake, root) = (fake_gcs().await, tempfile::tempdir().unwrap());
    let mount = Gcsfuse::mount(fake.url(), BUCKET, &root.path().join("mount"));
    let path = mount.path().to_owned();
    Subject::new(move || Arc::new(Mounted::new(&path, clock()).with_page(PAGE)), (mount, fake, root))
}

async fn gcs() -> Subject {
    let fake = fake_gcs().await;
    let connection = Arc::new(GcsConnection::new(Some(fake.url().to_owned())));
    Subject::new(move || Arc::new(gcs_through(&connection, BUCKET).with_write_rate(1e6, 1e6)), fake)
}

/// Only where somebody has given a bucket for it.
async fn real_gcs() -> Subject {
    let bucket = std::env::var("BATON_TEST_GCS_BUCKET").expect("BATON_TEST_GCS_BUCKET names a bucket to try");
    let connection = Arc::new(GcsConnection::new(None));
    let mut subject = Subject::new(move || Arc::new(gcs_through(&connection, &bucket)), ());
    subject.prefix = format!("test/{}/", clock().nonce());
    subject
}

pub const BUCKET: &str = "bucket";

pub async fn fake_gcs() -> FakeGcs {
    let options = FakeGcsOptions { buckets: vec![BUCKET.to_owned()], ..FakeGcsOptions::default() };
    FakeGcs::start(([127, 0, 0, 1], 0).into(), options).await.unwrap()
}

pub fn gcs_on(fake: &FakeGcs) -> Gcs {
    gcs_through(&Arc::new(GcsConnection::new(Some(fake.url().to_owned()))), BUCKET)
}

/// Its calls have plenty of time: the machine may be busy.
fn gcs_through(connection: &Arc<GcsConnection>, bucket: &str) -> Gcs {
    let patience = Duration::from_secs(20);
    Gcs::new(connection.clone(), bucket, clock()).with_page(PAGE).with_timeouts(patience, patience)
}

macro_rules! table {
    ($($(#[$attribute:meta])? $implementation:ident)*) => { $(
        mod $implementation {
            use super::*;
            table!(@cases $implementation $(#[$attribute])?
                an_object_is_created_once_updated_by_version_and_deleted_by_version
                what_is_not_there_is_missing_and_cannot_be_deleted
                a_poll_says_unchanged_changed_or_missing
                the_same_content_written_again_is_a_new_version
                of_forty_racing_creates_one_wins
                no_contended_increment_is_lost
                a_listing_goes_over_page_borders_in_the_order_of_keys
                a_listing_knows_the_version_a_poll_tells
                a_listing_says_when_an_object_was_last_written
                keys_that_climb_or_hide_are_refused
                a_large_object_is_not_polled_and_not_put
                files_come_back_as_they_went
                a_file_that_is_not_what_its_digest_says_is_not_uploaded
                a_download_that_is_not_what_its_digest_says_is_not_published
                an_upload_only_if_absent_keeps_what_is_there
                a_transfer_cancelled_in_the_middle_leaves_nothing
                progress_ends_at_the_size_of_the_file
                an_upload_repeated_with_the_same_content_is_settled
            );
        }
    )* };
    (@cases $implementation:ident $($case:ident)*) => { $( table!(@case $implementation [] $case); )* };
    (@cases $implementation:ident #[$attribute:meta] $($case:ident)*) => {
        $( table!(@case $implementation [#[$attribute]] $case); )*
    };
    (@case $implementation:ident [$(#[$attribute:meta])?] $case:ident) => {
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        $(#[$attribute])?
        async fn $case() {
            store_cases::$case(&super::$implementation().await).await;
        }
    };
}

table!(memory directory gcs #[ignore = "needs a real bucket, named by BATON_TEST_GCS_BUCKET"] real_gcs);

/// A mounted bucket keeps files and cannot compare and set.
macro_rules! mounted_table {
    ($($implementation:ident)*) => { $(
        mod $implementation {
            use super::*;
            table!(@cases $implementation
                a_listing_goes_over_page_borders_in_the_order_of_keys
                a_listing_knows_the_version_a_poll_tells
                keys_that_climb_or_hide_are_refused
                files_come_back_as_they_went
                a_file_that_is_not_what_its_digest_says_is_not_uploaded
                a_download_that_is_not_what_its_digest_says_is_not_published
                a_transfer_cancelled_in_the_middle_leaves_nothing
                progress_ends_at_the_size_of_the_file
                an_upload_repeated_with_the_same_content_is_settled
            );
        }
    )* };
}

mounted_table!(mounted gcsfuse);
