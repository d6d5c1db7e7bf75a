//! Arguments of the commands that put a device to the test: `calls`.

use clap::Args;

/// Arguments of `calls`.
#[derive(Debug, Args)]
#[command(after_long_help = CALLS_KEYS)]
pub struct CallsArgs {
    /// How often each call is made, after a first time that does not count.
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub rounds: u32,
}

const CALLS_KEYS: &str = "\
Memory is taken in sizes from 2 MiB to 2 GiB, as far as the device has them; access is set and memory unmapped once for a piece of
each size, and once for 1, 8 and 64 pieces of one granule at a time.

JSON keys, per call and size:
  device, call              where, and the driver call
  bytes                     the memory that one call is about; 0 where it is about none
  mappings                  the mappings that one call covers; 0 where it is about none
  rounds                    how often it was made
  median_us, p95_us         time of a call: the median, and what 95 % of them stay below
  modelled                  whether the times are the simulator's model, or were taken";
