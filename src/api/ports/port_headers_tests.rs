//! The tables of what passes and what does not.

use baton_protocol::id::SandboxId;

use super::*;

const ID: &str = "sandbox-0b9f5a52-6f0e-4b1c-9d3e-0123456789ab";

fn target() -> PortTarget {
    PortTarget { id: SandboxId::parse(ID).unwrap(), port: 8000 }
}

fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in pairs {
        headers.append(*name, value.parse().unwrap());
    }
    headers
}

fn inside(route: PortRoute, proxies: usize, pairs: &[(&'static str, &str)]) -> HeaderMap {
    let (target, keys) = (target(), ["operator".to_owned()]);
    let arrived = Arrived { target: &target, route, peer: "192.0.2.7".parse().unwrap(), proxies, keys: &keys };
    let mut headers = headers(pairs);
    to_inside(&mut headers, &arrived);
    headers
}

fn outside(route: PortRoute, pairs: &[(&'static str, &str)]) -> HeaderMap {
    let mut headers = headers(pairs);
    to_outside(&mut headers, &target(), route);
    headers
}

fn text(headers: &HeaderMap, name: &str) -> Option<String> {
    let values: Vec<_> = headers.get_all(name).iter().map(|value| value.to_str().unwrap()).collect();
    (!values.is_empty()).then(|| values.join(" | "))
}

#[test]
fn nothing_that_concerns_one_connection_or_is_ours_goes_inside() {
    let given = [
        ("host", "api.example"),
        ("connection", "close, x-mine"),
        ("x-mine", "1"),
        ("keep-alive", "5"),
        ("te", "trailers"),
        ("transfer-encoding", "chunked"),
        ("upgrade", "h2c"),
        ("proxy-authorization", "Basic x"),
        ("content-length", "5"),
        ("x-sandbox-token", "secret"),
        ("x-api-key", "operator"),
        ("x-serverless-authorization", "Bearer x"),
        ("forwarded", "for=1.1.1.1"),
        ("x-forwarded-for", "9.9.9.9"),
        ("x-forwarded-proto", "https"),
        ("x-forwarded-host", "evil.example"),
        ("cookie", "a=1; baton_token=secret; __Host-baton_token=secret"),
        ("cookie", "__Secure-BATON_token=secret; b=2"),
        ("sec-websocket-protocol", "chat, baton.token.secret, baton.key.operator"),
        ("authorization", "Bearer its-own"),
    ];
    let found = inside(PortRoute::Path, 0, &given);
    let mut names: Vec<_> = found.keys().map(HeaderName::as_str).collect();
    names.sort_unstable();
    let expected = [
        "authorization",
        "cookie",
        "host",
        "sec-websocket-protocol",
        "x-forwarded-for",
        "x-forwarded-host",
        "x-forwarded-prefix",
        "x-forwarded-proto",
    ];
    assert_eq!(names, expected);
    for (name, value) in [
        ("cookie", "a=1; b=2"),
        ("host", "localhost:8000"),
        ("sec-websocket-protocol", "chat"),
        ("x-forwarded-for", "192.0.2.7"),
        ("x-forwarded-host", "api.example"),
        ("x-forwarded-prefix", &target().prefix()),
        ("x-forwarded-proto", "http"),
    ] {
        assert_eq!(text(&found, name).as_deref(), Some(value), "{name}");
    }
    assert_eq!(text(&inside(PortRoute::Path, 0, &[("x-api-key", "its-own")]), "x-api-key").as_deref(), Some("its-own"));
    assert_eq!(text(&inside(PortRoute::Host, 0, &[("host", "a")]), "x-forwarded-prefix"), None);
    let proxied = [("x-forwarded-for", "9.9.9.9, 2.2.2.2"), ("x-forwarded-proto", "https"), ("host", "a")];
    let found = inside(PortRoute::Host, 1, &proxied);
    assert_eq!(text(&found, "x-forwarded-for").as_deref(), Some("2.2.2.2, 192.0.2.7"), "what the proxy saw");
    assert_eq!(text(&found, "x-forwarded-proto").as_deref(), Some("https"));
    let own = inside(PortRoute::Host, 0, &[("host", "a:1"), ("origin", "https://a:1")]);
    assert_eq!(text(&own, "origin").as_deref(), Some("http://localhost:8000"));
    let foreign = inside(PortRoute::Host, 0, &[("host", "a:1"), ("origin", "https://b")]);
    assert_eq!(text(&foreign, "origin").as_deref(), Some("https://b"));
}

#[test]
fn a_server_inside_rules_over_its_own_pages_only() {
    let given = [
        ("connection", "x-mine"),
        ("x-mine", "1"),
        ("service-worker-allowed", "/"),
        ("clear-site-data", "\"*\""),
        ("strict-transport-security", "max-age=1"),
        ("content-type", "text/html"),
    ];
    for route in [PortRoute::Path, PortRoute::Host] {
        let found = outside(route, &given);
        let kept = |name: &str| found.contains_key(name);
        assert!(kept("content-type"));
        assert!(!given[..5].iter().any(|(name, _)| kept(name)), "{found:?}");
    }
    let framed = outside(PortRoute::Host, &[("transfer-encoding", "chunked"), ("content-length", "5")]);
    assert!(framed.is_empty(), "two lengths are none: {framed:?}");
    let found = outside(PortRoute::Path, &[("content-security-policy", "default-src 'self'")]);
    let policies = text(&found, "content-security-policy").unwrap();
    assert!(policies.starts_with("default-src 'self' | sandbox ") && !policies.contains("same-origin"), "{policies}");
    assert_eq!(text(&outside(PortRoute::Host, &[]), "content-security-policy"), None);
}

#[test]
fn cookies_stay_on_their_own_path_and_host_and_never_take_the_place_of_ours() {
    let prefix = target().prefix();
    for (cookie, on_path, on_host) in [
        ("a=1", Some(format!("a=1; Path={prefix}/")), Some("a=1".to_owned())),
        ("a=1; Path=/", Some(format!("a=1; Path={prefix}/")), Some("a=1; Path=/".to_owned())),
        (
            "a=1; path=/x; Secure",
            Some(format!("a=1; Secure; Path={prefix}/x")),
            Some("a=1; Secure; Path=/x".to_owned()),
        ),
        (
            &format!("a=1; Path={prefix}/x"),
            Some(format!("a=1; Path={prefix}/x")),
            Some(format!("a=1; Path={prefix}/x")),
        ),
        ("a=1; Path=/sandboxes/sandbox-b/", Some(format!("a=1; Path={prefix}/sandboxes/sandbox-b/")), None),
        ("a=1; Domain=example; HttpOnly", Some(format!("a=1; HttpOnly; Path={prefix}/")), Some("a=1; HttpOnly".into())),
        ("baton_token=x; Path=/", None, None),
        ("__Host-baton_token=x; Path=/; Secure", None, None),
        ("__Host-own=x; Path=/; Secure", None, Some("__Host-own=x; Secure; Path=/".to_owned())),
    ] {
        assert_eq!(text(&outside(PortRoute::Path, &[("set-cookie", cookie)]), "set-cookie"), on_path, "{cookie}");
        let found = text(&outside(PortRoute::Host, &[("set-cookie", cookie)]), "set-cookie");
        if !cookie.contains("sandbox-b") {
            assert_eq!(found, on_host, "{cookie}");
        }
    }
}

#[test]
fn redirects_lead_to_where_the_client_reaches_the_server() {
    let prefix = target().prefix();
    for (location, on_path, on_host) in [
        ("/login?next=/", format!("{prefix}/login?next=/"), "/login?next=/"),
        ("http://localhost:8000/x", format!("{prefix}/x"), "/x"),
        ("http://127.0.0.1:8000", format!("{prefix}/"), "/"),
        ("http://localhost:9000/x", "http://localhost:9000/x".to_owned(), "http://localhost:9000/x"),
        ("https://example.org/", "https://example.org/".to_owned(), "https://example.org/"),
        ("//example.org/", "//example.org/".to_owned(), "//example.org/"),
        ("next", "next".to_owned(), "next"),
    ] {
        let found = |route| text(&outside(route, &[("location", location)]), "location");
        assert_eq!(found(PortRoute::Path), Some(on_path), "{location}");
        assert_eq!(found(PortRoute::Host).as_deref(), Some(on_host), "{location}");
    }
    let own = format!("{prefix}/x");
    assert_eq!(text(&outside(PortRoute::Path, &[("location", &own)]), "location"), Some(own.clone()));
}

#[test]
fn a_page_of_another_origin_is_told_from_the_user_and_from_programs() {
    let judge = |method: Method, pairs: &[(&'static str, &str)]| sender(&method, &headers(pairs), Some("a:1"));
    let (get, post) = (Method::GET, Method::POST);
    for (method, pairs, expected) in [
        (&get, &[][..], Sender::Trusted),
        (&post, &[], Sender::Trusted),
        (&post, &[("origin", "http://a:1")], Sender::Trusted),
        (&post, &[("origin", "http://a:2")], Sender::Foreign),
        (&post, &[("origin", "null")], Sender::Foreign),
        (&get, &[("sec-fetch-site", "same-origin")], Sender::Trusted),
        (&get, &[("sec-fetch-site", "none"), ("sec-fetch-mode", "navigate")], Sender::Trusted),
        (&get, &[("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "navigate")], Sender::Trusted),
        (&get, &[("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "no-cors")], Sender::Foreign),
        (&get, &[("sec-fetch-site", "same-site"), ("sec-fetch-mode", "no-cors")], Sender::Foreign),
        (&post, &[("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "navigate")], Sender::Foreign),
    ] {
        assert_eq!(judge(method.clone(), pairs), expected, "{method} {pairs:?}");
    }
}
