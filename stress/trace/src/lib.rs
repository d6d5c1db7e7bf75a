//! Recorded programs: reads them, and plays them to allocators.
//!
//! [`input`] reads PyTorch's memory snapshots, allocation traces and RMM's logs into a [`Program`];
//! a [`Script`] writes one by hand. A [`Player`] plays it to a [`Subject`]: this project's allocator
//! ([`Aquifer`]), a model of PyTorch's ([`PyTorch`]), the driver's pool ([`DriverPool`]), or a bare
//! index of blocks ([`Yardstick`]). [`Observed`] counts what the subject asks of the driver, and
//! [`Map`] has what lies where. A [`profile`] is a program's own use of memory over time.
//!
//! ```
//! use aquifer_trace::{OnOom, Player, Yardstick, input};
//!
//! let trace = "a 0 1048576 0\na 1 512 0\nf 0 0\nf 1 0\n";
//! let program = &input::read("example.trace".as_ref(), trace.as_bytes())?[0];
//! let mut subject = Yardstick::new(program.peak_requested_bytes, program.slots);
//! let pass = Player::new(program).pass(&mut subject, OnOom::Skip)?;
//! assert_eq!((program.operations(), pass.ooms), (4, 0));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod driver_pool;
mod headline;
pub mod input;
mod map;
mod observe;
mod play;
pub mod profile;
mod pytorch;
mod random;
mod script;
mod subject;
pub mod text;
mod yardstick;

pub use driver_pool::{DriverPool, PoolBlock};
pub use headline::{WITHOUT_STACK, WITHOUT_TAG, headline};
pub use input::{Event, Program};
pub use map::{Figures, Map, Piece, Use};
pub use observe::{Costs, FirstRefusal, Lagged, Observed, Spent};
pub use play::{OnOom, Pass, PlayError, Player, Times};
pub use pytorch::{Options, PyTorch};
pub use random::Random;
pub use script::{Block, Script};
pub use subject::{Aquifer, Measured, Refusal, Refused, Subject, streams_of};
pub use yardstick::Yardstick;
