//! Flags of commands that ask an engine: its key, and TLS.

use std::path::PathBuf;

use slipstream_planes::tls::{ClientFiles, ClientTls};
use slipstream_probe::Client;

/// An engine's key, and TLS for `https://`.
#[derive(clap::Args)]
pub(super) struct ClientArgs {
    /// API key of the engine
    #[arg(
        long,
        value_name = "KEY",
        env = "SLIPSTREAM_API_KEY",
        hide_env_values = true
    )]
    api_key: Option<String>,
    /// For https://: PEM file of the authorities to trust [default: those of this host]
    #[arg(long, value_name = "FILE")]
    ca_file: Option<PathBuf>,
    /// For https://: PEM file of the certificate to present
    #[arg(long, value_name = "FILE", requires = "key_file")]
    cert_file: Option<PathBuf>,
    /// For https://: PEM file of that certificate's key
    #[arg(long, value_name = "FILE", requires = "cert_file")]
    key_file: Option<PathBuf>,
    /// For https://: name that the engine's certificate must carry [default: the host of the URL]
    #[arg(long, value_name = "NAME")]
    server_name: Option<String>,
}

impl ClientArgs {
    /// A client for `url`.
    pub(super) fn client(&self, url: &str) -> anyhow::Result<Client> {
        let api_key = self.api_key.as_deref();
        let wants_tls =
            self.ca_file.is_some() || self.cert_file.is_some() || self.server_name.is_some();
        if !url.trim().starts_with("https://") {
            anyhow::ensure!(
                !wants_tls,
                "`{url}` is not https://, so nothing is encrypted or verified; write https://, or remove the flags of TLS"
            );
            return Ok(Client::new(url, api_key, None)?);
        }
        let client = self.cert_file.clone().zip(self.key_file.clone());
        let tls = ClientTls::load(&ClientFiles {
            ca: self.ca_file.clone(),
            client,
            server_name: self.server_name.clone(),
        })?;
        let client = Client::new(url, api_key, Some(tls.config().clone()))?;
        Ok(match tls.server_name() {
            Some(name) => client.with_server_name(name.clone()),
            None => client,
        })
    }
}
