//! The simulated device behind the CUDA driver's C ABI, so that code which calls the CUDA driver
//! runs, unmodified, where there is no GPU. For tests only.
//!
//! This crate is two things. As a C library (`libaquifer_standin.so`) it exports the driver's
//! functions, and `standin_*` functions that steer the simulated devices. As a Rust
//! library it loads that one: [`load`] opens it before anything calls the driver, and its `SONAME`
//! makes later requests for `libcuda.so` get it. No file of that name is made, because
//! cargo puts its target folder where programs look for libraries.
//!
//! ```no_run
//! let standin = aquifer_standin::load()?;
//! let device = standin.add_device("24GiB,seed=7")?; // open it as CUDA device `device.ordinal()`
//! assert!(device.violations().is_empty());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The two are built from the same source and share no state: each has its own copy of every
//! static.
//!
//! In the order in which calls go: `abi` declares functions · `process` and `thread` know devices
//! and contexts · each family of functions has a file · `ptx` reads modules · `control` steers ·
//! `environment` and `fail` set things up and make them fail · `loader` and `steering` are for
//! tests.
#![cfg_attr(not(target_os = "linux"), allow(dead_code, reason = "the library can only be loaded on Linux"))]

mod abi;
mod capture;
mod child;
mod conditional;
mod contexts;
mod control;
mod copies;
mod devices;
mod environment;
mod errors;
mod events;
mod exports;
mod fail;
mod fills;
mod graphs;
mod host;
mod loader;
mod memory;
mod modules;
mod nvml;
mod pointers;
mod pools;
mod process;
mod ptx;
mod rationed;
mod spin;
mod steering;
mod streams;
mod thread;
mod user_objects;
mod vmm;

pub use child::{in_child, in_process};
pub use control::{Mapped, Number};
pub use loader::{LoadError, Refused, Standin, load};
pub use nvml::{OTHER_PID, RESERVED};
pub use rationed::{ADDRESSES_FOR_MEMORY, Rationed, RationedMapping};
pub use spin::Spin;
pub use steering::StandinDevice;
