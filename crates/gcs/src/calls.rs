//! One function per call to Cloud Storage.

use std::time::{Duration, SystemTime};

use bytes::Bytes;
use google_cloud_gax::{options::RequestOptionsBuilder, retry_policy::NeverRetry};
use google_cloud_storage::{
    model::Object,
    read_resume_policy::{ReadResumePolicyExt, Recommended},
};

use crate::{
    Boxed, Content, Error, GcsClient, ObjectAttributes, ObjectPage, Read, Result, SHA256, UploadOptions, UploadSource,
    classify::{self, error},
    gcs_client::{small_retry, transfer_retry},
    source::Pulled,
};

/// Uploads of at least this size resume after a broken connection instead of starting over. Opening a resumable upload
/// takes a call of its own, which would delay small files.
const RESUMABLE: usize = 32 << 20;
/// How often a download resumes after a broken connection.
const RESUMES: u32 = 50;

impl GcsClient {
    /// Reads a small object of at most `most` bytes, unless its generation is still `known`.
    pub fn read<'a>(&'a self, bucket: &'a str, key: &'a str, known: Option<i64>, most: u64) -> Boxed<'a, Result<Read>> {
        Box::pin(async move {
            let mut request = self.data.read_object(bucket, key).with_retry_policy(small_retry());
            if let Some(known) = known {
                request = request.set_if_generation_not_match(known);
            }
            let mut response = match request.send().await {
                Ok(response) => response,
                Err(raw) if classify::is_unchanged(&raw) => return Ok(Read::Unchanged),
                Err(raw) => return Err(error(&raw)),
            };
            let about = response.object();
            let size = about.size.unsigned_abs();
            if size > most {
                return Err(Error::TooLarge(size));
            }
            let mut bytes = Vec::with_capacity(size as usize);
            // Read to the very end: the checksum is compared only there.
            while let Some(chunk) = response.next().await {
                bytes.extend_from_slice(&chunk.map_err(|raw| error(&raw))?);
            }
            Ok(Read::Found(bytes, about.generation))
        })
    }

    /// Writes a small object. Never retried.
    pub fn write<'a>(
        &'a self,
        bucket: &'a str,
        key: &'a str,
        bytes: Bytes,
        crc32c: u32,
        if_generation: Option<i64>,
    ) -> Boxed<'a, Result<ObjectAttributes>> {
        Box::pin(async move {
            let kind = if key.ends_with(".json") { "application/json" } else { "application/octet-stream" };
            let mut request = self
                .data
                .write_object(bucket, key, bytes)
                .set_content_type(kind)
                .with_known_crc32c(crc32c)
                .with_retry_policy(NeverRetry);
            if let Some(generation) = if_generation {
                request = request.set_if_generation_match(generation);
            }
            let object = request.send_unbuffered().await.map_err(|raw| error(&raw))?;
            Ok(about(object))
        })
    }

    /// Deletes an object. Never retried.
    pub fn delete<'a>(&'a self, bucket: &'a str, key: &'a str, if_generation: Option<i64>) -> Boxed<'a, Result<()>> {
        Box::pin(async move {
            let request = self.control.delete_object().set_bucket(bucket).set_object(key);
            let mut request = request.with_retry_policy(NeverRetry);
            if let Some(generation) = if_generation {
                request = request.set_if_generation_match(generation);
            }
            request.send().await.map_err(|raw| error(&raw))
        })
    }

    /// Lists up to `size` objects whose names begin with `prefix`, starting at the name `start`.
    pub fn list<'a>(
        &'a self,
        bucket: &'a str,
        prefix: &'a str,
        start: &'a str,
        size: usize,
        token: String,
    ) -> Boxed<'a, Result<ObjectPage>> {
        Box::pin(async move {
            let answer = self
                .control
                .list_objects()
                .set_parent(bucket)
                .set_prefix(prefix)
                .set_lexicographic_start(start)
                .set_page_size(i32::try_from(size).unwrap_or(i32::MAX))
                .set_page_token(token)
                .with_retry_policy(small_retry())
                .send()
                .await
                .map_err(|raw| error(&raw))?;
            Ok(ObjectPage { objects: answer.objects.into_iter().map(about).collect(), token: answer.next_page_token })
        })
    }

    pub fn about<'a>(&'a self, bucket: &'a str, key: &'a str) -> Boxed<'a, Result<ObjectAttributes>> {
        Box::pin(async move {
            let request = self.control.get_object().set_bucket(bucket).set_object(key);
            let object = request.with_retry_policy(small_retry()).send().await.map_err(|raw| error(&raw))?;
            Ok(about(object))
        })
    }

    /// Uploads a file, never through the library's buffer: its buffered upload stores truncated objects when a
    /// connection breaks. Reading at the offset the service asks for, with a checksum known beforehand, avoids that.
    pub fn upload<'a>(
        &'a self,
        bucket: &'a str,
        key: &'a str,
        source: Box<dyn UploadSource>,
        upload: UploadOptions,
    ) -> Boxed<'a, Result<ObjectAttributes>> {
        Box::pin(async move {
            let mut request = self
                .data
                .write_object(bucket, key, Pulled(source))
                .set_metadata([(SHA256, upload.sha256.as_str())])
                .with_known_crc32c(upload.crc32c)
                .with_resumable_upload_threshold(RESUMABLE)
                .with_retry_policy(transfer_retry());
            if let Some(generation) = upload.if_generation {
                request = request.set_if_generation_match(generation);
            }
            let object = request.send_unbuffered().await.map_err(|raw| error(&raw))?;
            Ok(about(object))
        })
    }

    /// Opens the content of a file from its beginning; a broken connection resumes where it broke.
    pub fn open<'a>(&'a self, bucket: &'a str, key: &'a str) -> Boxed<'a, Result<Content>> {
        Box::pin(async move {
            let request = self
                .data
                .read_object(bucket, key)
                .with_retry_policy(transfer_retry())
                .with_read_resume_policy(Recommended.with_attempt_limit(RESUMES));
            request.send().await.map(Content).map_err(|raw| error(&raw))
        })
    }
}

fn about(object: Object) -> ObjectAttributes {
    let updated = object.update_time.map(|time| {
        let nanos = time.nanos().unsigned_abs();
        SystemTime::UNIX_EPOCH + Duration::new(time.seconds().unsigned_abs(), nanos)
    });
    ObjectAttributes {
        generation: object.generation,
        size: object.size.unsigned_abs(),
        crc32c: object.checksums.as_ref().and_then(|sums| sums.crc32c),
        sha256: object.metadata.get(SHA256).cloned(),
        updated,
        name: object.name,
    }
}
