//! TLS in front of the same routes: rustls over the listener.
//!
//! Handshakes run beside one another and beside the accepting of connections, for a bounded time and in a bounded
//! number, so that a client that does not finish one holds nobody up.

use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::server::TlsStream;

/// How long a handshake may take.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Handshakes at once.
const HANDSHAKES: usize = 128;

/// A certificate with its key.
#[derive(Clone, Debug)]
pub struct Tls(Arc<ServerConfig>);

impl Tls {
    /// From PEM files: the chain, the server's own first, and its private key.
    pub fn load(cert: &Path, key: &Path) -> Result<Tls, String> {
        let fault =
            |path: &Path, what: &dyn std::fmt::Display| format!("{}: {what}", path.display());
        let chain =
            CertificateDer::pem_file_iter(cert).and_then(Iterator::collect::<Result<Vec<_>, _>>);
        let chain = chain.map_err(|e| fault(cert, &e))?;
        if chain.is_empty() {
            return Err(fault(cert, &"holds no certificate in PEM form"));
        }
        let private = PrivateKeyDer::from_pem_file(key).map_err(|e| fault(key, &e))?;
        let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|e| e.to_string())?
            .with_no_client_auth()
            .with_single_cert(chain, private);
        let mut config =
            config.map_err(|e| fault(key, &format!("does not fit the certificate: {e}")))?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Tls(Arc::new(config)))
    }
}

/// A listener whose connections are encrypted.
pub(crate) struct TlsListener {
    address: SocketAddr,
    ready: mpsc::Receiver<(TlsStream<TcpStream>, SocketAddr)>,
    accepting: tokio::task::JoinHandle<()>,
}

impl TlsListener {
    /// Accepts on `listener` from now on.
    pub fn new(mut listener: TcpListener, tls: &Tls) -> io::Result<TlsListener> {
        let address = listener.local_addr()?;
        let acceptor = TlsAcceptor::from(tls.0.clone());
        let (send, ready) = mpsc::channel(HANDSHAKES);
        let room = Arc::new(Semaphore::new(HANDSHAKES));
        let accepting = tokio::spawn(async move {
            loop {
                // Nobody closes it.
                let Ok(place) = room.clone().acquire_owned().await else { return };
                // That of axum waits out faults such as too many open files.
                let (stream, peer) = axum::serve::Listener::accept(&mut listener).await;
                // Where it fails, tokens are late.
                let _ = stream.set_nodelay(true);
                let (acceptor, send) = (acceptor.clone(), send.clone());
                tokio::spawn(async move {
                    let stream = tokio::time::timeout(HANDSHAKE, acceptor.accept(stream)).await;
                    drop(place);
                    match stream {
                        Ok(Ok(stream)) => {
                            // Nobody takes it: the server ends.
                            let _ = send.send((stream, peer)).await;
                        }
                        Ok(Err(error)) => tracing::debug!(%peer, %error, "no TLS handshake"),
                        Err(_) => tracing::debug!(%peer, "the TLS handshake took too long"),
                    }
                });
            }
        });
        Ok(TlsListener { address, ready, accepting })
    }
}

impl Drop for TlsListener {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

impl axum::serve::Listener for TlsListener {
    type Io = TlsStream<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        match self.ready.recv().await {
            Some(ready) => ready,
            // The task that accepts is gone, and with it the runtime.
            None => std::future::pending().await,
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.address)
    }
}
