//! The few messages of `google.storage.v2` that are served, with the fields that matter here.

use std::collections::HashMap;

#[derive(Clone, PartialEq, prost::Message)]
pub struct Timestamp {
    #[prost(int64, tag = "1")]
    pub seconds: i64,
    #[prost(int32, tag = "2")]
    pub nanos: i32,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Checksums {
    #[prost(fixed32, optional, tag = "1")]
    pub crc32c: Option<u32>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct ObjectResource {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(string, tag = "2")]
    pub bucket: String,
    #[prost(int64, tag = "3")]
    pub generation: i64,
    #[prost(int64, tag = "4")]
    pub metageneration: i64,
    #[prost(string, tag = "5")]
    pub storage_class: String,
    #[prost(int64, tag = "6")]
    pub size: i64,
    #[prost(string, tag = "13")]
    pub content_type: String,
    #[prost(message, optional, tag = "14")]
    pub create_time: Option<Timestamp>,
    #[prost(message, optional, tag = "16")]
    pub checksums: Option<Checksums>,
    #[prost(message, optional, tag = "17")]
    pub update_time: Option<Timestamp>,
    #[prost(map = "string, string", tag = "22")]
    pub metadata: HashMap<String, String>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct GetObject {
    #[prost(string, tag = "1")]
    pub bucket: String,
    #[prost(string, tag = "2")]
    pub object: String,
    #[prost(int64, optional, tag = "4")]
    pub if_generation_match: Option<i64>,
    #[prost(int64, optional, tag = "5")]
    pub if_generation_not_match: Option<i64>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct DeleteObject {
    #[prost(string, tag = "1")]
    pub bucket: String,
    #[prost(string, tag = "2")]
    pub object: String,
    #[prost(int64, optional, tag = "5")]
    pub if_generation_match: Option<i64>,
    #[prost(int64, optional, tag = "6")]
    pub if_generation_not_match: Option<i64>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct ListObjects {
    #[prost(string, tag = "1")]
    pub parent: String,
    #[prost(int32, tag = "2")]
    pub page_size: i32,
    #[prost(string, tag = "3")]
    pub page_token: String,
    #[prost(string, tag = "6")]
    pub prefix: String,
    #[prost(string, tag = "10")]
    pub lexicographic_start: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct ListObjectsResponse {
    #[prost(message, repeated, tag = "1")]
    pub objects: Vec<ObjectResource>,
    #[prost(string, tag = "3")]
    pub next_page_token: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct SourceObject {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(int64, tag = "2")]
    pub generation: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct ComposeObject {
    #[prost(message, optional, tag = "1")]
    pub destination: Option<ObjectResource>,
    #[prost(message, repeated, tag = "2")]
    pub sources: Vec<SourceObject>,
    #[prost(int64, optional, tag = "4")]
    pub if_generation_match: Option<i64>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Empty {}
