//! Maps errors of either transport to what they mean for the caller.

use google_cloud_gax::error::rpc::Code;
use google_cloud_storage::error::{ReadError, WriteError};

use crate::Error;

type Raw = google_cloud_storage::Error;

/// The answer to a conditional read if the object has not changed.
pub fn is_unchanged(error: &Raw) -> bool {
    error.http_status_code() == Some(304)
}

pub fn is_too_fast(error: &Raw) -> bool {
    error.http_status_code() == Some(429) || has_code(error, &[Code::ResourceExhausted])
}

pub fn error(error: &Raw) -> Error {
    let why = || explain(error);
    let status = error.http_status_code();
    // gRPC errors carry status 200, if they carry one at all.
    let is = |codes: &[u16]| status.is_some_and(|status| codes.contains(&status));
    if is(&[404]) || has_code(error, &[Code::NotFound]) {
        return Error::NotFound;
    }
    if is(&[412]) || has_code(error, &[Code::FailedPrecondition]) {
        return Error::Conflict;
    }
    if is_too_fast(error) {
        return Error::TooFast;
    }
    if is(&[401, 403]) || has_code(error, &[Code::PermissionDenied, Code::Unauthenticated]) {
        return Error::Denied(why());
    }
    if is_checksum_mismatch(error) || (is(&[400]) && why().contains("CRC32C")) {
        return Error::Damaged(why());
    }
    let passing =
        [Code::Unavailable, Code::Internal, Code::DeadlineExceeded, Code::Aborted, Code::Cancelled, Code::Unknown];
    let server_side = status.is_some_and(|status| status == 408 || status >= 500) || has_code(error, &passing);
    let on_the_way = status.is_none()
        && (error.is_io() || error.is_timeout() || error.is_connect() || error.is_transport() || error.is_exhausted());
    // A truncated answer, or one from another service, cannot be parsed: whether the call was applied is unknown, and
    // what was read is incomplete rather than wrong.
    let cut_off = error.is_deserialization();
    if server_side || on_the_way || cut_off || error.is_transient_and_before_rpc() {
        return Error::Unavailable(why());
    }
    if error.is_authentication() {
        return Error::Denied(why());
    }
    Error::Other(why())
}

/// Whether the library found a checksum mismatch with the service in what it read or wrote.
fn is_checksum_mismatch(error: &Raw) -> bool {
    causes(error).any(|cause| {
        matches!(cause.downcast_ref(), Some(ReadError::ChecksumMismatch(_)))
            || matches!(cause.downcast_ref(), Some(WriteError::ChecksumMismatch { .. }))
    })
}

fn causes(error: &Raw) -> impl Iterator<Item = &(dyn std::error::Error + 'static)> {
    std::iter::successors(std::error::Error::source(error), |cause| cause.source())
}

fn has_code(error: &Raw, codes: &[Code]) -> bool {
    error.status().is_some_and(|status| codes.contains(&status.code))
}

/// The whole chain of causes and the service's message, in one line of bounded length.
fn explain(error: &Raw) -> String {
    let mut text = error.to_string();
    for cause in causes(error) {
        text = format!("{text}: {cause}");
    }
    if let Some(said) = error.http_payload().and_then(|payload| std::str::from_utf8(payload).ok()) {
        text = format!("{text}: {said}");
    }
    text.split_whitespace().collect::<Vec<_>>().join(" ").chars().take(400).collect()
}

#[cfg(test)]
mod tests {
    use google_cloud_gax::error::rpc::Status;

    use super::*;

    fn http(status: u16, text: &'static str) -> Error {
        error(&Raw::http(status, Default::default(), text.into()))
    }

    fn grpc(code: Code, text: &str) -> Error {
        error(&Raw::service(Status::default().set_code(code).set_message(text)))
    }

    #[test]
    fn both_transports_mean_the_same_by_the_same() {
        assert!(matches!(http(404, "No such object: b/k"), Error::NotFound));
        assert!(matches!(grpc(Code::NotFound, "No such object."), Error::NotFound));
        assert!(matches!(http(412, ""), Error::Conflict));
        assert!(matches!(grpc(Code::FailedPrecondition, ""), Error::Conflict));
        assert!(matches!(http(429, ""), Error::TooFast));
        assert!(matches!(grpc(Code::ResourceExhausted, ""), Error::TooFast));
        for status in [408, 500, 502, 503, 504] {
            assert!(matches!(http(status, ""), Error::Unavailable(_)), "{status}");
        }
        for code in [Code::Unavailable, Code::Internal, Code::DeadlineExceeded, Code::Unknown] {
            assert!(matches!(grpc(code, ""), Error::Unavailable(_)), "{code:?}");
        }
        for status in [401, 403] {
            assert!(matches!(http(status, ""), Error::Denied(_)), "{status}");
        }
        assert!(matches!(grpc(Code::PermissionDenied, ""), Error::Denied(_)));
        assert!(matches!(http(400, "Provided CRC32C doesn't match"), Error::Damaged(_)));
        assert!(matches!(http(400, "what?"), Error::Other(_)));
    }

    #[test]
    fn only_a_checksum_mismatch_is_damage_and_an_answer_that_cannot_be_parsed_is_none() {
        use google_cloud_storage::error::ChecksumMismatch;
        let mismatch = ChecksumMismatch::Crc32c { got: 1, want: 2 };
        let read = Raw::deser(ReadError::ChecksumMismatch(mismatch.clone()));
        assert!(matches!(error(&read), Error::Damaged(_)), "{read:?}");
        let written = Raw::ser(WriteError::ChecksumMismatch { mismatch, object: Box::default() });
        assert!(matches!(error(&written), Error::Damaged(_)), "{written:?}");
        for cut in [Raw::deser("EOF while parsing an object"), Raw::deser(ReadError::MissingHeader("content-length"))] {
            assert!(matches!(error(&cut), Error::Unavailable(_)), "{cut:?}");
        }
        assert!(matches!(error(&Raw::io(ReadError::ShortRead(3))), Error::Unavailable(_)));
    }
}
