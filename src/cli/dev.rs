//! `baton dev`: tools for trying things out. `fake-gcs` is a Cloud Storage server in memory, so that
//! several servers on one machine can share a "bucket", and faults can be injected on demand.

use std::{
    io::{self, Write},
    net::{Ipv4Addr, SocketAddr},
    time::Duration,
};

use anyhow::Context;
use baton_fake_gcs::{FakeGcs, FakeGcsOptions, InjectedFault, parse_fault};

use super::time_value::parse_time;
use crate::config::variables::GCS_ENDPOINT;

#[derive(Debug, clap::Subcommand)]
pub enum Dev {
    /// Serve a Cloud Storage in memory on 127.0.0.1 until Ctrl-C; point servers at it with BATON_GCS_ENDPOINT.
    #[command(after_help = "Examples:\n  baton dev fake-gcs --port 4443 --latency 30ms\n  \
                      baton dev fake-gcs --port 4443 --fault write:lost,object=lock.json,times=3\n  \
                      BATON_GCS_ENDPOINT=http://127.0.0.1:4443 SANDBOX_METADATA_BUCKET=b baton serve")]
    FakeGcs(FakeGcsArgs),
}

#[derive(Debug, clap::Args)]
pub struct FakeGcsArgs {
    /// Port on 127.0.0.1; 0 takes a free one and prints it.
    #[arg(long, default_value_t = 4443)]
    pub port: u16,
    /// Added to every request.
    #[arg(long, default_value = "0s", value_parser = parse_time)]
    pub latency: Duration,
    /// How soon the same object may be written again; sooner is answered with 429.
    #[arg(long, value_parser = parse_time)]
    pub write_interval: Option<Duration>,
    /// What goes wrong: `OP:KIND[:VALUE][,object=TEXT][,times=N|forever]`. May be given several times.
    #[arg(long = "fault", value_parser = parse_fault)]
    pub faults: Vec<InjectedFault>,
}

pub async fn run(dev: Dev) -> anyhow::Result<()> {
    let Dev::FakeGcs(args) = dev;
    let options = FakeGcsOptions {
        latency: args.latency,
        write_interval: args.write_interval,
        faults: args.faults,
        ..FakeGcsOptions::default()
    };
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, args.port));
    let server = FakeGcs::start(address, options)
        .await
        .with_context(|| format!("cannot listen on {address}: choose another with --port"))?;
    writeln!(io::stdout(), "{GCS_ENDPOINT}={}", server.url())?;
    server.run().await;
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::{
        super::{Cli, Verb},
        *,
    };

    fn parsed(arguments: &[&str]) -> Result<FakeGcsArgs, clap::Error> {
        let cli = Cli::try_parse_from(["baton", "dev", "fake-gcs"].iter().chain(arguments))?;
        let Verb::Dev { verb: Dev::FakeGcs(args) } = cli.verb else { panic!("not fake-gcs") };
        Ok(args)
    }

    #[test]
    fn faults_and_latency_are_read() {
        let args =
            parsed(&["--port", "0", "--latency", "30ms", "--fault", "write:lost,times=3", "--fault", "read:flip"]);
        let args = args.unwrap();
        assert_eq!((args.port, args.latency, args.faults.len()), (0, Duration::from_millis(30), 2));
    }

    #[test]
    fn a_fault_that_does_not_exist_is_refused_with_those_that_do() {
        let error = parsed(&["--fault", "write:explode"]).unwrap_err().to_string();
        assert!(error.contains("KIND lost, drop"), "{error}");
    }
}
