// What each rank waits for in collectives. A thread writes the calls that take long to a file of the run's folder, so that
// ranks which use groups in different orders name each other's calls.
#include "waits.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <mutex>
#include <sstream>
#include <thread>

#include "standin.h"

namespace standin {
namespace {

using Clock = std::chrono::steady_clock;

// Calls that take longer are published.
constexpr auto kLong = std::chrono::seconds(1);

struct Wait {
    int process;
    int rank;
    Group group;
    std::string text;
    bool is_running;
    int peer;
    Clock::time_point begin;
};

std::mutex& mutex() {
    static auto* value = new std::mutex;
    return *value;
}

std::map<unsigned long long, Wait>& slots() {
    static auto* all = new std::map<unsigned long long, Wait>;
    return *all;
}

// The process's rank at its last call. The thread that publishes must not read RANK: Python may change variables meanwhile,
// which moves their memory.
int last_rank = 0;

// By the name of a group.
std::map<std::string, std::vector<int>>& known_processes() {
    static auto* all = new std::map<std::string, std::vector<int>>;
    return *all;
}

template <class Value>
bool has(const std::vector<Value>& values, const Value& value) {
    return std::find(values.begin(), values.end(), value) != values.end();
}

std::string joined(const std::vector<int>& numbers) {
    std::string result;
    for (const int number : numbers) result += std::to_string(number) + ' ';
    return result;
}

std::vector<int> split(const std::string& text) {
    std::vector<int> result;
    std::istringstream numbers(text);
    for (int number; numbers >> number;) result.push_back(number);
    return result;
}

std::string file_of(int process) { return state_folder() + "/waits-" + std::to_string(process); }

// The process's rank. Then one line a call, between tabs: whether it runs, its peer, ranks and processes of the group, its
// name, and the call.
std::string lines_of_long_calls() {
    std::ostringstream lines;
    std::lock_guard<std::mutex> lock(mutex());
    lines << last_rank << '\n';
    for (const auto& [number, wait] : slots()) {
        if (Clock::now() - wait.begin < kLong) continue;
        lines << wait.is_running << '\t' << wait.peer << '\t' << joined(wait.group.ranks) << '\t'
              << joined(wait.group.processes) << '\t' << wait.group.name << '\t' << wait.text << '\n';
    }
    return lines.str();
}

void publish_for_ever() {
    const std::string file = file_of(getpid());
    const std::string partial = file + ".partial";
    for (std::string written;; std::this_thread::sleep_for(kLong / 4)) {
        const std::string lines = lines_of_long_calls();
        if (lines == written) continue;
        written = lines;
        // Renamed when whole: a reader sees all of it.
        std::ofstream(partial) << lines;
        rename(partial.c_str(), file.c_str());
    }
}

// The long calls of the other processes.
struct Others {
    std::vector<Wait> waits;
    // No two processes of the run have the same RANK, this one included.
    bool are_ranks_unique = true;
};

Others read_others() {
    std::vector<Wait> waits;
    std::vector<int> ranks{own_rank()};
    Others others;
    std::error_code ignored;
    for (const auto& entry : std::filesystem::directory_iterator(state_folder(), ignored)) {
        const std::string name = entry.path().filename();
        if (name.rfind("waits-", 0) || entry.path() == file_of(getpid()) || entry.path().extension() == ".partial") continue;
        const int process = atoi(name.c_str() + name.find('-') + 1);
        // A killed process leaves its file, which says nothing about the ranks of a later attempt.
        if (kill(process, 0) && errno == ESRCH) continue;
        std::ifstream file(entry.path());
        std::string line;
        std::getline(file, line);
        const int rank = atoi(line.c_str());
        if (has(ranks, rank)) others.are_ranks_unique = false;
        ranks.push_back(rank);
        while (std::getline(file, line)) {
            std::istringstream fields(line);
            std::string is_running, peer, members, processes;
            Wait wait{};
            std::getline(fields, is_running, '\t');
            std::getline(fields, peer, '\t');
            std::getline(fields, members, '\t');
            std::getline(fields, processes, '\t');
            std::getline(fields, wait.group.name, '\t');
            std::getline(fields, wait.text);
            wait.process = process;
            wait.rank = rank;
            wait.is_running = is_running == "1";
            wait.peer = atoi(peer.c_str());
            wait.group.ranks = split(members);
            wait.group.processes = split(processes);
            waits.push_back(wait);
        }
    }
    // A rank whose call waits for its peers may be about to begin others. These do not count.
    const auto runs = [&](const Wait& wait) {
        return std::any_of(waits.begin(), waits.end(),
                           [&](const Wait& other) { return other.process == wait.process && other.is_running; });
    };
    for (const Wait& wait : waits)
        if (wait.is_running || !runs(wait)) others.waits.push_back(wait);
    return others;
}

}  // namespace

static thread_local Group group_of_thread;
void set_group(Group group) { group_of_thread = std::move(group); }
const Group& current_group() { return group_of_thread; }

int own_rank() {
    const char* rank = getenv("RANK");
    return rank ? atoi(rank) : getpid();
}

void note_processes(const Group& group) {
    std::lock_guard<std::mutex> lock(mutex());
    std::vector<int>& known = known_processes()[group.name];
    // Messages between two ranks have a communicator of these two.
    for (const int process : group.processes)
        if (!has(known, process)) known.push_back(process);
}

std::vector<int> processes_of(const std::string& group_name) {
    std::lock_guard<std::mutex> lock(mutex());
    const auto known = known_processes().find(group_name);
    return known == known_processes().end() ? std::vector<int>{} : known->second;
}

WaitSlot::WaitSlot(const Group& group, const std::string& text, bool is_running, int peer) {
    static unsigned long long next = 0;
    static int publishing_process = 0;
    std::lock_guard<std::mutex> lock(mutex());
    last_rank = own_rank();
    if (publishing_process != getpid()) {
        // A forked process has the calls of its parent, and no thread that publishes.
        slots().clear();
        publishing_process = getpid();
        std::thread(publish_for_ever).detach();
    }
    number_ = next++;
    slots().emplace(number_, Wait{getpid(), last_rank, group, text, is_running, peer, Clock::now()});
}

WaitSlot::~WaitSlot() {
    std::lock_guard<std::mutex> lock(mutex());
    slots().erase(number_);
}

std::string order_fault(const Group& group, const std::string& text, int peer) {
    const Others others = read_others();
    // Collectives of a group are compared by their numbers, but its messages between two ranks have numbers of their own.
    for (const Wait& other : others.waits)
        if (other.process == peer && other.peer == getpid() && other.group.name == group.name && other.text != text)
            return "rank " + std::to_string(own_rank()) + " calls " + text + ", rank " + std::to_string(other.rank) +
                   " calls " + other.text;
    // Ranks tell members apart only where no other world has the same.
    const auto has_member = [&](const Group& members, const Wait& wait) {
        if (members.processes.empty()) return others.are_ranks_unique && has(members.ranks, wait.rank);
        return has(members.processes, wait.process);
    };
    const auto is_in_group = [&](int process, const std::string& name) {
        return std::any_of(others.waits.begin(), others.waits.end(),
                           [&](const Wait& wait) { return wait.process == process && wait.group.name == name; });
    };
    std::vector<Wait> path{{getpid(), own_rank(), group, text, true, peer, {}}};
    // Each next rank belongs to the group of the one before, and is in a call of another group instead.
    const std::function<bool()> close_circle = [&] {
        const Group before = path.back().group;
        if (path.size() > 1 && has_member(before, path.front())) return true;
        for (const Wait& next : others.waits) {
            const auto is_same = [&](const Wait& wait) { return wait.process == next.process; };
            if (!has_member(before, next) || next.group.name == before.name || is_in_group(next.process, before.name) ||
                std::any_of(path.begin(), path.end(), is_same))
                continue;
            path.push_back(next);
            if (close_circle()) return true;
            path.pop_back();
        }
        return false;
    };
    if (!close_circle()) return "";
    std::string result = "ranks use groups in another order:";
    for (size_t i = 0; i < path.size(); i++)
        result += (i ? "; rank " : " rank ") + std::to_string(path[i].rank) + " waits in " + path[i].text + " in " +
                  path[i].group.name;
    return result;
}

}  // namespace standin
