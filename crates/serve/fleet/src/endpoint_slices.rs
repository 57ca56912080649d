//! Engines that Kubernetes lists: the ready endpoints of EndpointSlices, by label.
//!
//! A list, and then a watch from its version. A watch that ends continues from the last version, which bookmarks
//! advance; a version that the server has forgotten (410) begins with a new list.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use http_body_util::{BodyExt, Empty};
use hyper::body::Incoming;
use hyper::header::ACCEPT;
use hyper::{Request, Response, StatusCode};
use serde_json::Value;
use slipstream_config::cluster::{EngineUrl, KubernetesConfig};
use slipstream_os::files;
use slipstream_planes::tls::{ClientFiles, ClientTls};

use super::autoscale::TOKEN_FILE_BYTES_MAX;
use super::client::{Client, ClientError};
use super::membership::{Listing, MemberSource};

/// Files and variables of a process in a pod.
const ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
const HOST_VARIABLE: &str = "KUBERNETES_SERVICE_HOST";
const PORT_VARIABLE: &str = "KUBERNETES_SERVICE_PORT";

/// Time limit of a list, and of the head of a watch.
const ANSWER: Duration = Duration::from_secs(30);

/// The server ends a watch after this, s, and the next one continues it.
const WATCH_S: u32 = 300;

/// A watch without a byte for longer than it may last is dead.
const SILENCE: Duration = Duration::from_secs(WATCH_S as u64 + 30);

/// Pause after a failure, and before a watch that follows a shorter one.
const PAUSE: Duration = Duration::from_secs(1);

/// A version that the server forgets sooner is a failure.
const VERSION_LASTS: Duration = Duration::from_secs(5);

/// Limits of a list, and of an event, bytes.
const LIST_BYTES_MAX: usize = 64 << 20;
const EVENT_BYTES_MAX: usize = 8 << 20;

/// An API server.
struct Api {
    server: Client,
    /// Read for each request: tokens are renewed.
    token_file: Option<PathBuf>,
}

/// EndpointSlices with a label.
pub struct EndpointSlices {
    api: Api,
    /// Path and query of the list.
    path: String,
    selector: String,
    /// Name or number of the port; `None`: a slice has one.
    port: Option<String>,
    /// Engines by slice.
    slices: BTreeMap<String, BTreeSet<String>>,
    /// The version that the next watch begins at; `None`: a list is needed.
    version: Option<String>,
    watch: Option<Watch>,
    failed: bool,
    listed: Option<Instant>,
}

struct Watch {
    began: Instant,
    body: Incoming,
    /// Read, but not a whole event yet.
    held: BytesMut,
    /// Bytes of it without a line break.
    searched: usize,
}

/// Why there is no list or event.
#[derive(Debug, thiserror::Error)]
enum Fault {
    #[error("the server does not know this version any more")]
    Gone,
    #[error(transparent)]
    Unreachable(#[from] ClientError),
    #[error("{0}")]
    Failed(String),
}

impl EndpointSlices {
    /// Slices with the label `selector`.
    ///
    /// # Errors
    /// The API server's address is not known, or its files cannot be read.
    pub fn new(
        config: &KubernetesConfig,
        selector: &str,
        port: Option<&str>,
    ) -> anyhow::Result<EndpointSlices> {
        let in_pod = |name: &str| PathBuf::from(ACCOUNT).join(name);
        let url = if let Some(url) = &config.url {
            url.clone()
        } else {
            let variable = |name: &str| {
                std::env::var(name).map_err(|_| {
                        anyhow::anyhow!(
                            "`endpoint_slices` needs Kubernetes' API server: {name} is not set, as it is in a pod; set \
                             `upstream.kubernetes_url`"
                        )
                    })
            };
            let (host, port) = (variable(HOST_VARIABLE)?, variable(PORT_VARIABLE)?);
            let host = if host.contains(':') {
                format!("[{host}]")
            } else {
                host
            };
            let text = format!("https://{host}:{port}");
            EngineUrl::parse(&text).map_err(|why| anyhow::anyhow!("`{text}` {why}"))?
        };
        let files = ClientFiles {
            ca: config.ca_file.clone().or_else(|| Some(in_pod("ca.crt"))),
            ..ClientFiles::default()
        };
        let tls = url.tls.then(|| ClientTls::load(&files)).transpose()?;
        // A token is not sent without encryption.
        let token_file = url
            .tls
            .then(|| config.token_file.clone().unwrap_or_else(|| in_pod("token")));
        let namespace = match &config.namespace {
            Some(namespace) => namespace.clone(),
            None => files::read_text(&in_pod("namespace")).map_err(|error| {
                anyhow::anyhow!(
                    "`endpoint_slices` needs a namespace: {} cannot be read ({error}); set `upstream.kubernetes_namespace`",
                    in_pod("namespace").display()
                )
            })?,
        };
        let path = format!(
            "/apis/discovery.k8s.io/v1/namespaces/{}/endpointslices?labelSelector={}",
            escaped(namespace.trim()),
            escaped(selector)
        );
        Ok(EndpointSlices {
            api: Api {
                server: Client { url, tls },
                token_file,
            },
            path,
            selector: selector.to_owned(),
            port: port.map(str::to_owned),
            slices: BTreeMap::new(),
            version: None,
            watch: None,
            failed: false,
            listed: None,
        })
    }

    /// Lists, or reads an event. True: the engines may have changed.
    async fn step(&mut self) -> Result<bool, Fault> {
        let Some(version) = self.version.clone() else {
            let list = self.api.json(&self.path).await?;
            self.slices.clear();
            for slice in list["items"].as_array().into_iter().flatten() {
                self.put(slice);
            }
            let version = list["metadata"]["resourceVersion"].as_str();
            let version = version.ok_or_else(|| Fault::Failed("the list has no version".into()))?;
            self.version = Some(version.to_owned());
            self.listed = Some(Instant::now());
            return Ok(true);
        };
        let Some(watch) = &mut self.watch else {
            let path = format!(
                "{}&watch=1&allowWatchBookmarks=true&timeoutSeconds={WATCH_S}&resourceVersion={}",
                self.path,
                escaped(&version)
            );
            let body = self.api.get(&path).await?.into_body();
            self.watch = Some(Watch {
                began: Instant::now(),
                body,
                held: BytesMut::new(),
                searched: 0,
            });
            return Ok(false);
        };
        let Some(line) = watch.line().await? else {
            let lasted = watch.began.elapsed();
            self.watch = None; // its time is over
            tokio::time::sleep(PAUSE.saturating_sub(lasted)).await;
            return Ok(false);
        };
        let event: Value = serde_json::from_slice(&line)
            .map_err(|error| Fault::Failed(format!("an event is not JSON: {error}")))?;
        let object = &event["object"];
        let kind = event["type"].as_str().unwrap_or_default();
        if kind == "ERROR" {
            let text = object["message"].as_str().unwrap_or("no message");
            return Err(match object["code"].as_u64() {
                Some(410) => Fault::Gone,
                _ => Fault::Failed(format!("the watch failed: {text}")),
            });
        }
        if let Some(version) = object["metadata"]["resourceVersion"].as_str() {
            self.version = Some(version.to_owned());
        }
        match kind {
            "ADDED" | "MODIFIED" => self.put(object),
            "DELETED" => {
                let name = object["metadata"]["name"].as_str().unwrap_or_default();
                self.slices.remove(name);
            }
            _ => return Ok(false), // a bookmark
        }
        Ok(true)
    }

    fn put(&mut self, slice: &Value) {
        let Some(name) = slice["metadata"]["name"].as_str() else {
            return;
        };
        let engines = engines(slice, self.port.as_deref());
        self.slices.insert(name.to_owned(), engines);
    }
}

impl MemberSource for EndpointSlices {
    fn name(&self) -> String {
        format!("EndpointSlices {}", self.selector)
    }

    fn next(&mut self) -> Listing<'_> {
        Box::pin(async move {
            if std::mem::take(&mut self.failed) {
                tokio::time::sleep(PAUSE).await;
            }
            loop {
                match self.step().await {
                    Ok(true) => return Ok(self.slices.values().flatten().cloned().collect()),
                    Ok(false) => {}
                    Err(fault) => {
                        self.watch = None;
                        self.failed = true;
                        if matches!(fault, Fault::Gone) {
                            self.version = None;
                            if self
                                .listed
                                .take()
                                .is_some_and(|at| at.elapsed() > VERSION_LASTS)
                            {
                                self.failed = false;
                                continue;
                            }
                            return Err("it forgets its versions at once (410 Gone)".into());
                        }
                        return Err(fault.to_string());
                    }
                }
            }
        })
    }
}

/// The ready endpoints of `slice`.
fn engines(slice: &Value, port: Option<&str>) -> BTreeSet<String> {
    let ports = slice["ports"].as_array().map_or(&[][..], Vec::as_slice);
    let number = |of: &Value| of["port"].as_u64().map(|number| number.to_string());
    let is_it = |of: &&Value| match port {
        None => ports.len() == 1,
        Some(name) => of["name"] == *name || number(of).as_deref() == Some(name),
    };
    let Some(port) = ports.iter().find(is_it).and_then(|of| of["port"].as_u64()) else {
        return BTreeSet::new();
    };
    let is_v6 = slice["addressType"] == "IPv6";
    let endpoints = slice["endpoints"].as_array().into_iter().flatten();
    endpoints
        // Absent means ready.
        .filter(|of| of["conditions"]["ready"] != false)
        .filter_map(|of| {
            let address = of["addresses"][0].as_str()?;
            let text = if is_v6 {
                format!("http://[{address}]:{port}")
            } else {
                format!("http://{address}:{port}")
            };
            Some(EngineUrl::parse(&text).ok()?.to_string())
        })
        .collect()
}

/// The service account's token. It is replaced while the process runs.
async fn read_token(file: PathBuf) -> std::io::Result<String> {
    let read = tokio::task::spawn_blocking(move || files::reread_text(&file, TOKEN_FILE_BYTES_MAX));
    read.await.map_err(std::io::Error::other)?
}

impl Api {
    async fn get(&self, path: &str) -> Result<Response<Incoming>, Fault> {
        let asked = async {
            let request = Request::get(format!("{}{path}", self.server.url.prefix))
                .header(ACCEPT, "application/json")
                .body(Empty::<Bytes>::new())
                .map_err(|error| Fault::Failed(error.to_string()))?;
            let token = match &self.token_file {
                Some(file) => Some(read_token(file.clone()).await.map_err(|error| {
                    Fault::Failed(format!("the token {}: {error}", file.display()))
                })?),
                None => None,
            };
            let token = token.as_deref().map(str::trim);
            Ok::<_, Fault>(self.server.send(request, token).await?)
        };
        let asked = tokio::time::timeout(ANSWER, asked).await;
        let answer = asked.map_err(|_| Fault::Failed(format!("no answer within {ANSWER:?}")))??;
        match answer.status() {
            StatusCode::OK => Ok(answer),
            StatusCode::GONE => Err(Fault::Gone),
            status => Err(Fault::Failed(format!(
                "{} answers {status}{}",
                self.server.url,
                match status {
                    StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN =>
                        "; the service account needs list and watch of endpointslices (discovery.k8s.io)",
                    _ => "",
                }
            ))),
        }
    }

    async fn json(&self, path: &str) -> Result<Value, Fault> {
        let body = self.get(path).await?.into_body();
        let body = http_body_util::Limited::new(body, LIST_BYTES_MAX).collect();
        let body = tokio::time::timeout(ANSWER, body).await;
        let body = body.map_err(|_| Fault::Failed(format!("the list takes over {ANSWER:?}")))?;
        let body = body.map_err(|error| Fault::Failed(error.to_string()))?;
        serde_json::from_slice(&body.to_bytes())
            .map_err(|error| Fault::Failed(format!("the list is not JSON: {error}")))
    }
}

impl Watch {
    /// The next event; `None`: the watch is over.
    async fn line(&mut self) -> Result<Option<Bytes>, Fault> {
        loop {
            let rest = &self.held[self.searched..];
            if let Some(end) = rest.iter().position(|&byte| byte == b'\n') {
                let line = self.held.split_to(self.searched + end + 1).freeze();
                self.searched = 0;
                if line.trim_ascii().is_empty() {
                    continue;
                }
                return Ok(Some(line));
            }
            self.searched = self.held.len();
            if self.held.len() > EVENT_BYTES_MAX {
                return Err(Fault::Failed("an event is too long".into()));
            }
            match tokio::time::timeout(SILENCE, self.body.frame()).await {
                Err(_) | Ok(None) => return Ok(None),
                Ok(Some(Err(error))) => return Err(Fault::Failed(error.to_string())),
                Ok(Some(Ok(frame))) => {
                    if let Ok(data) = frame.into_data() {
                        self.held.extend_from_slice(&data);
                    }
                }
            }
        }
    }
}

/// `text` as a part of a path, or a value of a query.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            out.push(byte.into());
        } else {
            let _ = write!(out, "%{byte:02X}"); // into memory
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn ready_endpoints_of_the_port_are_engines() {
        let slice = json!({
            "metadata": {"name": "s"}, "addressType": "IPv4",
            "ports": [{"name": "http", "port": 8000}, {"name": "metrics", "port": 9000}],
            "endpoints": [
                {"addresses": ["10.0.0.1"], "conditions": {"ready": true}},
                {"addresses": ["10.0.0.2"], "conditions": {"ready": false, "terminating": true}},
                {"addresses": ["10.0.0.3"], "conditions": {}},
                {"addresses": ["10.0.0.4"]},
                {"addresses": []},
                {"addresses": ["not an address"]},
            ],
        });
        let of = |port| engines(&slice, port).into_iter().collect::<Vec<_>>();
        let expected = [
            "http://10.0.0.1:8000",
            "http://10.0.0.3:8000",
            "http://10.0.0.4:8000",
        ];
        assert_eq!(of(Some("http")), expected);
        assert_eq!(of(Some("8000")), expected);
        assert_eq!(of(Some("other")), [""; 0]);
        assert_eq!(of(None), [""; 0], "which of the two?");
        let v6 = json!({
            "addressType": "IPv6", "ports": [{"port": 80}], "endpoints": [{"addresses": ["fd00::1"]}],
        });
        assert_eq!(
            engines(&v6, None).into_iter().next().unwrap(),
            "http://[fd00::1]:80"
        );
        assert_eq!(engines(&json!({}), None).len(), 0);
    }
}
