// What each rank waits for in collectives. A thread writes the calls that take long to a file of the run's folder, so that
// ranks which use groups in different orders name each other's calls.
#include "waits.h"

#include <unistd.h>

#include <algorithm>
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

std::string file_of(int process) { return state_folder() + "/waits-" + std::to_string(process); }

// One line a call: rank, whether it runs, its peer, ranks of the group, its name and the call, between tabs.
std::string lines_of_long_calls() {
    std::ostringstream lines;
    std::lock_guard<std::mutex> lock(mutex());
    for (const auto& [number, wait] : slots()) {
        if (Clock::now() - wait.begin < kLong) continue;
        lines << wait.rank << '\t' << wait.is_running << '\t' << wait.peer << '\t';
        for (const int rank : wait.group.ranks) lines << rank << ' ';
        lines << '\t' << wait.group.name << '\t' << wait.text << '\n';
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

std::vector<Wait> waits_of_others() {
    std::vector<Wait> result;
    std::error_code ignored;
    for (const auto& entry : std::filesystem::directory_iterator(state_folder(), ignored)) {
        const std::string name = entry.path().filename();
        if (name.rfind("waits-", 0) || entry.path() == file_of(getpid()) || entry.path().extension() == ".partial") continue;
        std::ifstream file(entry.path());
        for (std::string line; std::getline(file, line);) {
            std::istringstream fields(line);
            std::string rank, is_running, peer, ranks;
            Wait wait{};
            std::getline(fields, rank, '\t');
            std::getline(fields, is_running, '\t');
            std::getline(fields, peer, '\t');
            std::getline(fields, ranks, '\t');
            std::getline(fields, wait.group.name, '\t');
            std::getline(fields, wait.text);
            wait.rank = atoi(rank.c_str());
            wait.is_running = is_running == "1";
            wait.peer = atoi(peer.c_str());
            std::istringstream members(ranks);
            for (int member; members >> member;) wait.group.ranks.push_back(member);
            result.push_back(wait);
        }
    }
    // A rank whose call waits for its peers may be about to begin others. These do not count.
    const auto runs = [&](const Wait& wait) {
        return std::any_of(result.begin(), result.end(),
                           [&](const Wait& other) { return other.rank == wait.rank && other.is_running; });
    };
    std::vector<Wait> counting;
    for (const Wait& wait : result)
        if (wait.is_running || !runs(wait)) counting.push_back(wait);
    return counting;
}

bool has_member(const Group& group, int rank) {
    return std::find(group.ranks.begin(), group.ranks.end(), rank) != group.ranks.end();
}

}  // namespace

static thread_local Group group_of_thread;
void set_group(Group group) { group_of_thread = std::move(group); }
const Group& current_group() { return group_of_thread; }

int own_rank() {
    const char* rank = getenv("RANK");
    return rank ? atoi(rank) : getpid();
}

WaitSlot::WaitSlot(const Group& group, const std::string& text, bool is_running, int peer) {
    static unsigned long long next = 0;
    static int publishing_process = 0;
    std::lock_guard<std::mutex> lock(mutex());
    if (publishing_process != getpid()) {
        // A forked process has the calls of its parent, and no thread that publishes.
        slots().clear();
        publishing_process = getpid();
        std::thread(publish_for_ever).detach();
    }
    number_ = next++;
    slots().emplace(number_, Wait{own_rank(), group, text, is_running, peer, Clock::now()});
}

WaitSlot::~WaitSlot() {
    std::lock_guard<std::mutex> lock(mutex());
    slots().erase(number_);
}

std::string order_fault(const Group& group, const std::string& text, int peer) {
    const std::vector<Wait> others = waits_of_others();
    // Collectives of a group are compared by their numbers, but its messages between two ranks have numbers of their own.
    for (const Wait& other : others)
        if (other.rank == peer && other.peer == own_rank() && other.group.name == group.name && other.text != text)
            return "rank " + std::to_string(own_rank()) + " calls " + text + ", rank " + std::to_string(peer) + " calls " +
                   other.text;
    const auto is_in_group = [&](int rank, const std::string& name) {
        return std::any_of(others.begin(), others.end(),
                           [&](const Wait& wait) { return wait.rank == rank && wait.group.name == name; });
    };
    std::vector<Wait> path{{own_rank(), group, text, true, peer, {}}};
    // Each next rank belongs to the group of the one before, and is in a call of another group instead.
    const std::function<bool()> close_circle = [&] {
        const Group before = path.back().group;
        if (path.size() > 1 && has_member(before, path.front().rank)) return true;
        for (const Wait& next : others) {
            const auto is_same = [&](const Wait& wait) { return wait.rank == next.rank; };
            if (!has_member(before, next.rank) || next.group.name == before.name || is_in_group(next.rank, before.name) ||
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
