//! The rows of what was tried, which `explain`, `advise`, `report` and `demo` share.

use crate::row::row;
use crate::table::{bytes, factor, ms, optional};

row! {
    /// Of each of the allocators
    #[derive(Default)]
    pub struct Allocator {
        #[serde(skip)]
        pub(crate) title: String => ["allocator"],
        /// its name
        pub name: String,
        /// its options, as for --config
        pub(crate) config: String,
        /// the most memory that it held from the device
        pub peak_reserved_bytes: u64 => ["holds", |row| bytes(row.served(Some(row.peak_reserved_bytes)))],
        /// its ratio to peak_requested_bytes; null with ooms
        pub reserved_over_requested: Option<f64> => ["holds, ratio", factor],
        /// requests refused; the other figures are then those of the served requests
        pub ooms: u64 => ["OOMs"],
        /// the size of the smallest device on which the program finishes; null if there is none
        pub smallest_device_bytes: Option<u64> => ["smallest device", bytes],
        /// driver calls
        pub driver_calls: Option<u64> => ["driver calls", |row| optional(row.served(row.driver_calls))],
        /// their time, by the simulator's cost model
        pub(crate) driver_time_modelled_us: Option<f64>
            => ["driver ms, modelled", |row| ms(row.served(row.driver_time_modelled_us))],
        /// the same time of a later pass, in the mean
        pub(crate) warm_driver_time_modelled_us: Option<f64>
            => ["later driver ms, modelled", |row| ms(row.served(row.warm_driver_time_modelled_us))],
        /// the smallest card with room for that device and a CUDA context of 0.5 GiB
        pub(crate) smallest_card: Option<&'static str> => ["smallest card", optional],
    }
}

impl Allocator {
    /// A figure that would be too low if a request had been refused.
    fn served<T>(&self, figure: Option<T>) -> Option<T> {
        figure.filter(|_| self.ooms == 0)
    }
}

row! {
    /// Of oom
    pub struct Oom {
        /// the device
        pub device_bytes: u64,
        /// whether it is made up, because neither the user nor the recording names one on which memory is
        /// lacking
        pub(crate) is_made_up: bool,
        /// the refused event, from 1
        pub event: u64,
        /// the refused request
        pub requested_bytes: u64,
        /// free memory, in the cache and on the device
        pub free_bytes: u64,
        /// the largest piece of that
        pub largest_free_bytes: u64,
        /// allocators that finish there, found by trying
        pub finishes_with: Vec<String>,
    }
}

row! {
    /// Of answers
    pub struct Answer {
        /// the question, in a few words
        pub question: &'static str,
        /// the answer
        pub answer: String,
    }
}

row! {
    /// A piece of advice
    pub struct Advice {
        /// what to do
        pub title: String,
        /// the evidence
        pub text: String,
        /// bytes that are held less; null if more are held, or that is not known
        pub saves: Option<u64>,
        /// the options and their figures, if it is about options
        #[serde(flatten)]
        pub figures: Option<Figures>,
    }
}

row! {
    /// What a program takes with some options, with which it finishes, and before
    pub struct Figures {
        #[serde(skip)]
        pub(crate) title: String,
        /// for options: as for --config
        pub config: String,
        /// the same as for the environment variable that the title names
        pub options: String,
        /// what the allocator holds with them
        pub peak_reserved_bytes: u64,
        /// the same with the snapshot's options, or else PyTorch's defaults; for fewer driver calls,
        /// with Aquifer's defaults; null if a request was refused then
        pub peak_reserved_bytes_before: Option<u64>,
        /// the smallest device with them
        pub smallest_device_bytes: Option<u64>,
        /// and before
        pub smallest_device_bytes_before: Option<u64>,
        /// the driver time with them, by the simulator's cost model
        pub driver_time_modelled_us: Option<f64>,
        /// and before; null if a request was refused then
        pub driver_time_modelled_us_before: Option<f64>,
        /// the same of each later pass
        pub warm_driver_time_modelled_us: Option<f64>,
        /// and before
        pub warm_driver_time_modelled_us_before: Option<f64>,
    }
}
