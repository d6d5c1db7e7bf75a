//! A second race checker for programs that make driver calls, written from CUDA's documentation and
//! apart from the simulator's race detector, so that the two check each other.
//!
//! [`Judged`] decorates a driver, and passes each call that succeeded to an [`Oracle`]. The oracle
//! decides by vector clocks which operations happen before which, and finds those that touch the
//! same memory without an order.
//!
//! * `clock` – vector clocks, and what the host knows to be complete;
//! * `memory` – who wrote each byte last and who has read it since; mappings;
//! * `world` – streams, events, captures and graphs, and **the rules of order**;
//! * `race` – the reports;
//! * `judge` – the oracle, **the rules of memory**, what is not judged, and what the two checkers
//!   must agree on;
//! * `driver` – the decorator.
//!
//! The tests run random programs and named ones on the simulated device. `aquifer-machine simulate`
//! has each of its programs judged.
//!
//! ```
//! use aquifer_device::{Driver, StreamFlags};
//! use aquifer_sim::{SimConfig, SimDriver};
//! use aquifer_oracle::Judged;
//!
//! let driver = Judged::new(SimDriver::new(SimConfig::new(1 << 30)));
//! let (one, two) = (driver.create_stream(StreamFlags::default())?, driver.create_stream(StreamFlags::default())?);
//! let memory = driver.alloc(1 << 20)?;
//! driver.memset(memory, 1, 1 << 20, one)?;
//! driver.memset(memory, 2, 1 << 20, two)?; // nothing orders it after the first
//! println!("{}", driver.races()[0]);
//! # Ok::<(), aquifer_device::DeviceError>(())
//! ```

mod clock;
mod driver;
mod judge;
mod memory;
mod race;
mod world;

pub use driver::Judged;
pub use judge::{Call, Oracle};
pub use memory::Touch;
pub use race::{Op, Race, RaceKind};
