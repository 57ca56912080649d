//! The server, and the form of requests.

use std::net::{SocketAddr, ToSocketAddrs};

use crate::run::BenchError;

/// Which OpenAI endpoint is loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Endpoint {
    /// `/v1/completions`: prompts have the exact length, as no template adds to them.
    #[default]
    Completions,
    /// `/v1/chat/completions`: the server's template adds tokens of its own.
    Chat,
}

/// How a prompt is sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PromptForm {
    /// As words.
    #[default]
    Text,
    /// As token ids (completions only): exact for every tokenizer.
    Tokens,
}

/// A server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// The URL, without a final slash.
    pub url: String,
    /// `HOST` or `HOST:PORT`, for the `Host` header.
    pub authority: String,
    /// Path before `/v1`, usually empty.
    pub base_path: String,
    /// Addresses, in order of preference; at least one.
    pub addresses: Vec<SocketAddr>,
}

impl Target {
    /// Parses a URL, `http://HOST[:PORT][/PATH]`, and looks its host up. A final `/v1` is dropped,
    /// since OpenAI clients' base URLs have it.
    ///
    /// # Errors
    /// [`BenchError::Url`] if it is malformed, [`BenchError::Lookup`] if the host is not known.
    pub fn resolve(url: &str) -> Result<Target, BenchError> {
        let bad = |why: &str| BenchError::Url {
            url: url.to_owned(),
            why: why.to_owned(),
        };
        let rest = match url.split_once("://") {
            Some(("http", rest)) => rest,
            Some(("https", _)) => {
                return Err(bad(
                    "https is not supported; load the server's plain port, or put a TLS-ending proxy on this machine in between",
                ));
            }
            Some(_) => return Err(bad("write http://HOST:PORT")),
            None => url,
        };
        let rest = rest.trim_end_matches('/');
        let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        if authority.is_empty()
            || authority.contains(['@', ' ', '?', '#'])
            || path.contains([' ', '?', '#'])
        {
            return Err(bad("write http://HOST:PORT"));
        }
        let has_port = authority.rsplit_once(':').is_some_and(|(host, port)| {
            !port.is_empty()
                && port.bytes().all(|b| b.is_ascii_digit())
                && (!host.contains(':') || host.ends_with(']'))
        });
        let host_port = if has_port {
            authority.to_owned()
        } else {
            format!("{authority}:80")
        };
        let lookup = |source| BenchError::Lookup {
            host: authority.to_owned(),
            source,
        };
        let addresses: Vec<SocketAddr> = host_port.to_socket_addrs().map_err(lookup)?.collect();
        if addresses.is_empty() {
            return Err(lookup(std::io::Error::other("the name has no address")));
        }
        Ok(Target {
            url: format!("http://{rest}"),
            authority: authority.to_owned(),
            base_path: path.strip_suffix("/v1").unwrap_or(path).to_owned(),
            addresses,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_as_people_write_them() {
        for (url, authority, path, port) in [
            ("http://127.0.0.1:8000", "127.0.0.1:8000", "", 8000),
            ("127.0.0.1:8000/", "127.0.0.1:8000", "", 8000),
            ("http://127.0.0.1/v1/", "127.0.0.1", "", 80),
            ("http://[::1]:9/a/v1", "[::1]:9", "/a", 9),
            ("http://[::1]", "[::1]", "", 80),
        ] {
            let target = Target::resolve(url).unwrap();
            assert_eq!((&*target.authority, &*target.base_path), (authority, path));
            assert_eq!(target.addresses[0].port(), port);
        }
    }

    #[test]
    fn other_urls_are_refused_with_a_reason() {
        for (url, says) in [
            ("https://x", "https"),
            ("ftp://x", "http://HOST"),
            ("http://", "http://HOST"),
            ("http://u@h", "http://HOST"),
        ] {
            let error = Target::resolve(url).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
    }
}
