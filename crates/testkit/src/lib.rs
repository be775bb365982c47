//! What tests run instead of the machine's clock and of runsc: simulated time, and containers without a kernel.
//!
//! The server does not link it. Paths begin with `baton::` everywhere, because the unit tests of `baton` include these
//! files as a module: through this crate they would see a second `baton`, whose traits are other ones.

pub mod fake_containers;
pub mod fake_machine;
mod fake_output;
mod fake_ports;
mod fake_sandbox;
mod test_clock;

pub use fake_containers::{ACTION_TIMEOUT, ActionFault, FakeContainers};
pub use fake_ports::FakePorts;
pub use test_clock::TestClock;
